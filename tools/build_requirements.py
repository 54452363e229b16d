"""Print the requirements that pyproject.toml states for building, for one extra or for a group.

The CUTLASS package comes on its own (--cutlass): its headers need none of its dependencies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main() -> None:
    """Print them, one to a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--extra", help="those of this extra")
    which.add_argument("--group", help="those of this dependency group")
    which.add_argument("--cutlass", action="store_true", help="the CUTLASS package alone")
    arguments = parser.parse_args()
    pyproject: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())
    if arguments.extra:
        print(*pyproject["project"]["optional-dependencies"][arguments.extra], sep="\n")
        return
    if arguments.group:
        print(*pyproject["dependency-groups"][arguments.group], sep="\n")
        return
    requirements = [*pyproject["build-system"]["requires"], "cmake>=3.26", "ninja"]
    for requirement in requirements:
        if requirement.startswith("nvidia-cutlass") == arguments.cutlass:
            print(requirement)


if __name__ == "__main__":
    main()
