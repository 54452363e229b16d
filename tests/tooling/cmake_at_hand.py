"""The CMakes of this environment and of the machine, which may be the oldest that is supported."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

_FOLDERS = (str(Path(sys.executable).parent), None, "/usr/bin")
CMAKES = tuple(dict.fromkeys(filter(None, (shutil.which("cmake", path=p) for p in _FOLDERS))))
CMAKE = CMAKES[0] if CMAKES else None
