"""The names of GPUs, as `agmm explain --gpu` takes them."""

from __future__ import annotations

import ctypes
from functools import cache

from agmm.errors import InvalidArgument
from agmm.planning import card_rates, cost_model, tables
from agmm.planning.cost_model.cards import CARDS, Card, DriverFacts, of_facts, with_measured
from agmm.planning.problems import CPU, DEFAULT_GPU
from agmm.runtime import devices

HOPPERS = {
    "nvidia-h100-80gb-hbm3": 132,
    "nvidia-h100-pcie": 114,
    "nvidia-h100-nvl": 132,
    "nvidia-h200": 132,
    "nvidia-h200-nvl": 132,
    "nvidia-h20": 78,
    "nvidia-h800": 132,
    "nvidia-gh200-480gb": 132,
}
"""The names of Hopper GPUs as their driver gives them, with their multiprocessors."""
OTHERS = {
    "nvidia-a100-sxm4-40gb": (8, 0),
    "nvidia-a100-sxm4-80gb": (8, 0),
    "nvidia-a100-pcie-40gb": (8, 0),
    "nvidia-a100-80gb-pcie": (8, 0),
    "nvidia-l40s": (8, 9),
    "nvidia-b200": (10, 0),
    "nvidia-rtx-pro-6000-blackwell-server-edition": (12, 0),
    "nvidia-rtx-pro-6000-blackwell-workstation-edition": (12, 0),
}
"""The names of GPUs of other architectures, as NVIDIA's drivers and datasheets give them, with
their compute capabilities."""
_SPOKEN = {
    "h100": "nvidia-h100-80gb-hbm3",
    "h100-sxm": "nvidia-h100-80gb-hbm3",
    "h100-sxm5": "nvidia-h100-80gb-hbm3",
    "h200-sxm": "nvidia-h200",
    "gh200": "nvidia-gh200-480gb",
    "a100": "nvidia-a100-sxm4-80gb",
    "rtx-pro-6000": "nvidia-rtx-pro-6000-blackwell-server-edition",
}
_BRAND = "nvidia-"
_NAME_BYTES = 256


def known_gpus() -> list[str]:
    """Every GPU that has constants or a table, and the CPU."""
    return sorted({*cost_model.known_gpus(), *tables.known_gpus(), CPU})


def find_gpu(name: str | None) -> str:
    """The GPU that a name, or some words of one, means; for None the one here, else the default.

    Those with constants or a table come before others of the same words.

    Raises InvalidArgument where it means none or several.
    """
    if name is None:
        return gpu_here() or DEFAULT_GPU
    wanted = tables.gpu_name(name)
    short = wanted.removeprefix(_BRAND)
    known = known_gpus()
    for gpus in (known, HOPPERS, OTHERS):
        for gpu in (wanted, _BRAND + short, "" if gpus is known else _SPOKEN.get(short, "")):
            if gpu in gpus:
                return gpu
        words = {*short.split("-")} - {"", "nvidia"}
        found = [gpu for gpu in gpus if words and words <= {*gpu.split("-")}]
        if len(found) == 1:
            return found[0]
    others = ", ".join(gpu for gpu in HOPPERS if gpu not in known)
    raise InvalidArgument(
        f"gpu: found {name!r}, wanted one of {', '.join(known)}, or, with the constants of "
        f"{DEFAULT_GPU}, of {others}, or, by data sheets, of {', '.join(OTHERS)}"
    )


_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, as cuda.h has them."""
_SMS, _CLOCK_KHZ, _MEMORY_CLOCK_KHZ, _MEMORY_BITS = 16, 13, 36, 37
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _CLOCK_RATE, _MEMORY_CLOCK_RATE and
_GLOBAL_MEMORY_BUS_WIDTH, as cuda.h has them."""


def capability_of(gpu: str) -> tuple[int, int] | None:
    """The compute capability of a GPU of `OTHERS`, or of the first one here; None of others."""
    if gpu in OTHERS or gpu != gpu_here():
        return OTHERS.get(gpu)
    return capability_here()


@cache
def capability_here() -> tuple[int, int] | None:
    """The compute capability of the first GPU that this process sees, None where it sees none."""
    found = _attributes_here(_MAJOR, _MINOR)
    return None if found is None else (found[0], found[1])


@cache
def _attributes_here(*attributes: int) -> tuple[int, ...] | None:
    """What the driver says of the first GPU that this process sees, None where it sees none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    values = []
    for attribute in attributes:
        if driver.cuDeviceGetAttribute(ctypes.byref(found), attribute, device):
            return None
        values.append(found.value)
    return tuple(values)


def card_of(gpu: str) -> Card | None:
    """The peaks of a GPU that agmm has no matmul kernels for: measured ones of `agmm tune --alone`,
    else those of its data sheet, else, of the first GPU here, those that its driver says."""
    card = CARDS.get(gpu)
    if card is None and gpu == gpu_here():
        card = card_here()
    found = None if card is None else card_rates.read(gpu)
    return card if found is None or card is None else with_measured(card, *found)


def card_here() -> Card | None:
    """What the driver and NVML say of the first GPU that this process sees; None where they do
    not."""
    name = gpu_here()
    found = _attributes_here(_MAJOR, _MINOR, _SMS, _CLOCK_KHZ, _MEMORY_CLOCK_KHZ, _MEMORY_BITS)
    if name is None or found is None:
        return None
    major, minor, sms, clock, memory_clock, bits = found
    nvlinks, pcie = devices.ways_out(0)
    return of_facts(
        DriverFacts(
            *(name, (major, minor), sms, clock // 1000, memory_clock // 1000, bits),
            *(nvlinks, pcie),
        )
    )


def gpu_here() -> str | None:
    """The name of the first GPU that this process sees, None where it sees none."""
    found = gpus_here()
    return tables.gpu_name(found[0]) if found else None


@cache
def gpus_here() -> tuple[str, ...]:
    """The driver's names of the GPUs that this process sees. The driver is asked without torch,
    which takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, names = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    for i in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        failed = driver.cuDeviceGet(ctypes.byref(device), i)
        if failed or driver.cuDeviceGetName(name, _NAME_BYTES, device):
            return ()
        names.append(name.value.decode())
    return tuple(names)
