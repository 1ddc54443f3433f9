"""Failures inside the inherited contract are shown in full."""

import pytest

pytest.register_assert_rewrite("forkpoint.testing.store_contract")
