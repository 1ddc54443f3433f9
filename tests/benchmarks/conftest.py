"""The benchmarks are programs in a folder, not a package: its modules are found as they are when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
