"""The CMake of this environment, or else of the machine; None where there is none."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
