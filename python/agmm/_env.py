"""Every environment variable of agmm, in one place."""

from __future__ import annotations

import math
import os
from typing import Final, NamedTuple

from agmm.errors import InvalidArgument


class Variable(NamedTuple):
    name: str
    default: str
    meaning: str


TIMEOUT_S: Final = Variable(
    "AGMM_TIMEOUT_S",
    "600",
    "seconds that any wait for another rank may take; past them the process ends with a message "
    "and exit code 124",
)
WARN_S: Final = Variable(
    "AGMM_WARN_S",
    "30",
    "after so many seconds a wait says on stderr who waits for whom and since when; 0: never",
)
COMMIT: Final = Variable(
    "AGMM_COMMIT", "", "commit that `agmm bench` reports outside a git checkout of agmm"
)
CACHE_DIR: Final = Variable(
    "AGMM_CACHE_DIR", "", "folder of your tuned plans; default: agmm in the user's cache folder"
)
CACHE: Final = Variable("AGMM_CACHE", "on", "off: your tuned plans are neither read nor written")
SHARED_GPUS: Final = Variable(
    "AGMM_SHARED_GPUS",
    "off",
    "on: ranks of a group may share a GPU, in turns of milliseconds; for tests of more ranks than "
    "GPUs",
)
RESERVED_SMS: Final = Variable(
    "AGMM_RESERVED_SMS",
    "auto",
    "multiprocessors that matmuls leave to kernels of other groups: a number, or auto, which is 8 "
    "where the process is in other NCCL groups than the default one, else 0",
)
EARLY_START: Final = Variable(
    "AGMM_EARLY_START",
    "off",
    "on: a matmul that gathers nothing is set up while the kernel ahead of it in its stream still "
    "runs; weights: one for few rows loads its weight then too, which no kernel may write",
)
CHECK_NAN: Final = Variable(
    "AGMM_CHECK_NAN",
    "off",
    "look for NaNs in what a rank is about to send: `off`, `warn` or `raise`, see `agmm.check_nan`",
)
RECORD: Final = Variable(
    "AGMM_RECORD",
    "",
    "rank 0 writes the calls of the process into this file when it ends, for `agmm tune --file`; "
    "with `{rank}` in the name every rank writes a file",
)
REPORT: Final = Variable(
    "AGMM_REPORT",
    "",
    "rank 0 writes what `agmm.status` says, with counts, into this file when it ends; with "
    "`{rank}` in the name every rank writes a file",
)
LEARN: Final = Variable(
    "AGMM_LEARN",
    "off",
    "on: the first calls of a kind without a tuned plan try a few plans and keep the fastest, see "
    "`agmm.learn_plans`; the same on all ranks",
)
BATCH_INVARIANT: Final = Variable(
    "AGMM_BATCH_INVARIANT",
    "off",
    "on: ops that take `batch_invariant=`, and column-wise linears for decoding, compute the bits "
    "of a row independently of how many other rows there are, where a call does not say otherwise; "
    "the same on all ranks",
)
MESSAGES: Final = Variable(
    "AGMM_MESSAGES",
    "off",
    "on: calls of 1,024 rows or more take the portable path by themselves in groups that span "
    "hosts, or whose GPUs have no peer access, those of layers and of torch's async TP too; the "
    "same on all ranks",
)
SGLANG: Final = Variable(
    "AGMM_SGLANG",
    "0",
    "1: agmm serves the linears of SGLang's sequence parallelism, in every process of SGLang",
)
VLLM: Final = Variable(
    "AGMM_VLLM", "0", "1: agmm serves vLLM's tensor parallelism, in every process of vLLM"
)
EARLY_STARTS: Final = ("off", "on", "weights")
NAN_MODES: Final = ("off", "warn", "raise")
RUN_TIME: Final = (
    *(
        TIMEOUT_S,
        WARN_S,
        COMMIT,
        CACHE_DIR,
        CACHE,
        SHARED_GPUS,
        RESERVED_SMS,
        EARLY_START,
        CHECK_NAN,
        RECORD,
        REPORT,
        LEARN,
        BATCH_INVARIANT,
        MESSAGES,
        SGLANG,
        VLLM,
    ),
)
BUILD_TIME: Final = (
    Variable("AGMM_CUDA", "AUTO", "the CUDA kernels: AUTO (where nvcc is found), ON or OFF"),
    Variable(
        "AGMM_KERNELS",
        "default",
        "default; minimal for quick builds; ci: a kernel of each kind, which is what make test "
        "compiles where there is no GPU; or all: also kernels that hardly gained on H200",
    ),
    Variable(
        "CUTLASS_DIR", "", "a CUTLASS 4.2.0 checkout to use instead of the nvidia-cutlass package"
    ),
)


TEST_TIME: Final = ("AGMM_TEST_RANKS", "AGMM_STRESS_CALLS")
"""The variables of the tests, which read them themselves."""


def timeout_s() -> float:
    """`TIMEOUT_S` as a number. Raises InvalidArgument where it is none."""
    return _seconds("timeout_seconds")


def timeout_ms() -> int:
    """`timeout_s` in whole ms, for barriers on a GPU: at most as long as the core's kernels
    wait."""
    return math.ceil(min(timeout_s(), _LONGEST_ON_GPU_S) * 1e3)


_LONGEST_ON_GPU_S = 1e6
"""The longest wait on a GPU, which the core's kernels have too. It is a choice: whoever waits for
twelve days waits for ever."""


def warn_s() -> float:
    """`WARN_S` as a number. Raises InvalidArgument where it is none."""
    return _seconds("warn_seconds")


def _seconds(function: str) -> float:
    from agmm import _core  # not above: `agmm doctor` works where it does not load, too

    try:
        return float(getattr(_core, function)())
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def check() -> None:
    """Raises InvalidArgument for a run-time variable with an impossible value, so that a command
    finds it before it measures something, and not in each of its calls."""
    timeout_s()
    warn_s()
    for variable in (CACHE, SHARED_GPUS, LEARN, BATCH_INVARIANT, MESSAGES):
        is_on(variable)
    early_start()
    reserved_sms()
    check_nan()


def unknown() -> list[str]:
    """The names of variables that are set and begin with AGMM_, but that agmm does not know."""
    known = {variable.name for variable in (*RUN_TIME, *BUILD_TIME)} | set(TEST_TIME)
    return sorted(name for name in os.environ if name.startswith("AGMM_") and name not in known)


def is_on(variable: Variable) -> bool:
    """The value of a variable that is "on" or "off".

    Raises:
        InvalidArgument: it is neither.
    """
    value = os.environ.get(variable.name) or variable.default
    if value not in ("on", "off"):
        raise InvalidArgument(f"{variable.name}: found {value!r}, wanted 'on' or 'off'")
    return value == "on"


def check_nan() -> str:
    """The value of AGMM_CHECK_NAN. Raises InvalidArgument where it is none of `NAN_MODES`."""
    return _one_of(CHECK_NAN, NAN_MODES)


def batch_invariant() -> str:
    """The value of AGMM_BATCH_INVARIANT when the process began, so that compiled calls hold it.
    Raises InvalidArgument where it is neither "on" nor "off"."""
    if batch_invariant_at_start not in ("on", "off"):
        raise InvalidArgument(
            f"{BATCH_INVARIANT.name}: found {batch_invariant_at_start!r}, wanted 'on' or 'off'"
        )
    return batch_invariant_at_start


batch_invariant_at_start = os.environ.get(BATCH_INVARIANT.name) or BATCH_INVARIANT.default


def early_start() -> str:
    """The value of AGMM_EARLY_START, which the core reads. Raises InvalidArgument where it is none
    of `EARLY_STARTS`."""
    return _one_of(EARLY_START, EARLY_STARTS)


def _one_of(variable: Variable, choices: tuple[str, ...]) -> str:
    value = os.environ.get(variable.name) or variable.default
    if value not in choices:
        wanted = ", ".join(choices)
        raise InvalidArgument(f"{variable.name}: found {value!r}, wanted one of {wanted}")
    return value


def reserved_sms() -> int | None:
    """The value of AGMM_RESERVED_SMS; None for auto.

    Raises:
        InvalidArgument: it is neither "auto" nor a number.
    """
    value = os.environ.get(RESERVED_SMS.name) or RESERVED_SMS.default
    if value == "auto":
        return None
    if not value.isdecimal():
        raise InvalidArgument(f"{RESERVED_SMS.name}: found {value!r}, wanted 'auto' or a number")
    return int(value)
