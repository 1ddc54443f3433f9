"""Makes the strategies of this folder and the second reader importable; tests are no package."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "golden"):
    sys.path.insert(0, str(folder))
