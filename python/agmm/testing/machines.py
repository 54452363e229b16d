"""Links of real machines, as `nvidia-smi topo -m` prints them, and a stand-in for their NVML."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from agmm.runtime.topology import Link, Matrix

# V100 SXM2 in DGX-1 and the clouds' machines of eight: two quads, each GPU with a partner. Between
# the sockets there is no peer access but by NVLink: marked with "-".
_DGX_1V = """
 X  NV1 NV1 NV2 NV2 SYS SYS SYS
NV1  X  NV2 NV1 SYS NV2 SYS SYS
NV1 NV2  X  NV2 SYS SYS NV1 SYS
NV2 NV1 NV2  X  SYS SYS SYS NV1
NV2 SYS SYS SYS  X  NV1 NV1 NV2
SYS NV2 SYS SYS NV1  X  NV2 NV1
SYS SYS NV1 SYS NV1 NV2  X  NV2
SYS SYS SYS NV1 NV2 NV1 NV2  X
"""

DGX_1V = _DGX_1V.replace("SYS", "SYS-")

# P100: the same graph with single links.
DGX_1P = DGX_1V.replace("NV2", "NV1")


def switched(gpus: int, nvlinks: int) -> str:
    """DGX A100 and H100, HGX, DGX-2: all pairs through NVSwitches."""
    rows = [["X" if a == b else f"NV{nvlinks}s" for b in range(gpus)] for a in range(gpus)]
    return "\n".join(map(" ".join, rows))


DGX_2 = switched(16, 6)
DGX_A100 = switched(8, 12)
DGX_H100 = switched(8, 18)

# Boards of four without switches: HGX A100 and HGX H100.
HGX_A100_4 = "X NV4 NV4 NV4\nNV4 X NV4 NV4\nNV4 NV4 X NV4\nNV4 NV4 NV4 X"
HGX_H100_4 = HGX_A100_4.replace("NV4", "NV6")

# H100 NVL: bridges between neighbours, PCIe between the pairs.
H100_NVL_4 = """
 X   NV12 NODE SYS
NV12  X   NODE SYS
NODE NODE  X   NV12
SYS  SYS  NV12  X
"""
H100_NVL_8 = """
 X   NV12 NODE NODE SYS  SYS  SYS  SYS
NV12  X   NODE NODE SYS  SYS  SYS  SYS
NODE NODE  X   NV12 SYS  SYS  SYS  SYS
NODE NODE NV12  X   SYS  SYS  SYS  SYS
SYS  SYS  SYS  SYS   X   NV12 NODE NODE
SYS  SYS  SYS  SYS  NV12  X   NODE NODE
SYS  SYS  SYS  SYS  NODE NODE  X   NV12
SYS  SYS  SYS  SYS  NODE NODE NV12  X
"""

PCIE_8 = """
 X  PIX PXB PXB SYS SYS SYS SYS
PIX  X  PXB PXB SYS SYS SYS SYS
PXB PXB  X  PIX SYS SYS SYS SYS
PXB PXB PIX  X  SYS SYS SYS SYS
SYS SYS SYS SYS  X  PIX PXB PXB
SYS SYS SYS SYS PIX  X  PXB PXB
SYS SYS SYS SYS PXB PXB  X  PIX
SYS SYS SYS SYS PXB PXB PIX  X
"""

# Consumer cards, whose driver gives no peer access.
RTX_4090_4 = "X PHB- PHB- PHB-\nPHB- X PHB- PHB-\nPHB- PHB- X PHB-\nPHB- PHB- PHB- X"


def matrix(text: str) -> list[list[Link]]:
    """The matrix that a table shows. Pairs without NVLink have peer access unless marked "-"."""
    return [[_link(cell) for cell in line.split()] for line in text.strip().splitlines()]


def _link(cell: str) -> Link:
    if cell == "X":
        return Link()
    if cell.startswith("NV"):
        return Link(int(cell.strip("NVs")), cell.endswith("s"), "SYS", True)
    return Link(0, False, cell.strip("-"), not cell.endswith("-"))


def some(links: Matrix, gpus: Iterable[int]) -> list[list[Link]]:
    """What is left where only some GPUs are visible, in that order."""
    gpus = list(gpus)
    return [[links[a][b] for b in gpus] for a in gpus]


def shuffled(links: Matrix, seed: int) -> list[list[Link]]:
    """The machine with its GPUs numbered otherwise."""
    return some(links, random.Random(seed).sample(range(len(links)), len(links)))


def uuids(links: Sequence[object]) -> list[str]:
    return [f"GPU-{index}" for index in range(len(links))]


SWITCHES = "00000000:c3:00.0"


def bus(gpu: int) -> str:
    return f"00000000:{gpu:02x}:00.0"


_LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
_OVER_NVLINK = 2  # NVML's number for it, as in agmm.runtime.devices


class Driver:
    """NVML of a machine with such links. GPUs that are not visible are unknown to it."""

    NVLINK_MAX_LINKS = 18

    def __init__(self, links: Matrix, visible: list[int] | None = None) -> None:
        self.links = links
        self.visible = list(range(len(links))) if visible is None else visible
        self.init_v2 = self.shutdown = lambda: None
        self.hidden_ends = False
        self.ends: list[list[tuple[int, str]]] = []
        for a, row in enumerate(links):
            self.ends.append([])
            for b, link in enumerate(row):
                if a != b and link.nvlinks and not link.switched:
                    self.ends[a] += [(0, bus(b))] * link.nvlinks
            if any(link.switched for link in row):
                self.ends[a] = [(2, SWITCHES)] * max(link.nvlinks for link in row)

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        gpu = int(uuid.removeprefix("GPU-"))
        if gpu not in self.visible:
            raise RuntimeError("Not Found")
        return gpu

    def device_get_pci_info_v3(self, gpu: int) -> Any:
        return SimpleNamespace(bus_id=bus(gpu).upper())

    def device_get_nvlink_state(self, gpu: int, link: int) -> int:
        if link >= len(self.ends[gpu]):
            raise RuntimeError("Invalid Argument")
        return 1

    def device_get_nvlink_remote_device_type(self, gpu: int, link: int) -> int:
        return 255 if self.hidden_ends else self.ends[gpu][link][0]

    def device_get_nvlink_remote_pci_info_v2(self, gpu: int, link: int) -> Any:
        if self.hidden_ends:
            raise RuntimeError("Not Supported")
        return SimpleNamespace(bus_id=self.ends[gpu][link][1].encode() + b"\0")

    def device_get_topology_common_ancestor(self, a: int, b: int) -> int:
        return _LEVELS[self.links[a][b].pcie]

    def device_get_p2p_status(self, a: int, b: int, what: int) -> int:
        link = self.links[a][b]
        has = bool(link.nvlinks) if what == _OVER_NVLINK else bool(link.peer)
        return 0 if has else 5
