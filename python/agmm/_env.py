"""Every environment variable of agmm, in one place."""

from __future__ import annotations

from typing import Final, NamedTuple


class Variable(NamedTuple):
    name: str
    default: str
    meaning: str


TIMEOUT_S: Final = Variable(
    "AGMM_TIMEOUT_S",
    "60",
    "limit of every wait in seconds; past it the process ends with a message and exit code 124 "
    "(read by the C++ core at each call)",
)
COMMIT: Final = Variable(
    "AGMM_COMMIT", "", "commit to name in benchmark reports where there is no git checkout"
)
CACHE_DIR: Final = Variable(
    "AGMM_CACHE_DIR", "", "folder of the tuned tables; default: agmm in the user's cache folder"
)
CACHE: Final = Variable(
    "AGMM_CACHE", "on", "off: the user's tuned tables are neither read nor written"
)
RUN_TIME: Final = (TIMEOUT_S, COMMIT, CACHE_DIR, CACHE)
BUILD_TIME: Final = (
    Variable("AGMM_CUDA", "AUTO", "build the CUDA core: AUTO (where nvcc is found), ON or OFF"),
    Variable("AGMM_KERNELS", "default", "which kernels to build: minimal or default"),
    Variable("CUTLASS_DIR", "", "CUTLASS headers to use instead of the package nvidia-cutlass"),
)
