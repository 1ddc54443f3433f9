"""Kernels: rows, packed weights, pages, and one fixed order for every sum. Knows no model and no continuation."""
