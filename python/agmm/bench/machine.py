"""The machine and the versions, as far as they can be found out. This module loads without torch
and the core."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from agmm import _installation
from agmm._installation import version
from agmm.runtime import devices

torch, torch_error = _installation.load_torch()


def machine_facts() -> dict[str, Any]:
    """Return machine and versions, for reports: strings, numbers and lists only; None where
    unknown."""
    count = 0 if torch is None else torch.cuda.device_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return {
        "device_name": gpus[0] if gpus else processor_name(),
        "gpus": gpus,
        "host_cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
        "cuda": None if torch is None else torch.version.cuda,
        "nccl": nccl_version(),
        "driver": devices.driver_version(),
        "agmm": version(),
    }


def nccl_version() -> str | None:
    """The version of the NCCL that torch uses."""
    if torch is None:
        return None
    dist = torch.distributed
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def processor_name() -> str:
    """The model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
