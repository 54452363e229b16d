"""How the GPUs here are linked, and what that means for a user of agmm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agmm.bench.machine import torch
from agmm.cli.findings import Finding
from agmm.runtime import devices
from agmm.runtime.topology import (
    FULLY_CONNECTED,
    Kind,
    Matrix,
    islands,
    kind_of,
    matrix_of,
    quads,
    schedule_of,
)

_LINKS_MEAN = {
    Kind.CUBE_MESH: "ranks of one half reach each other over NVLink, those of both not all",
    Kind.PAIRS: "the two ranks of a pair reach each other over NVLink, larger groups not",
    Kind.PARTIAL: "only groups whose pairs all have NVLinks are as fast as plans take them to be",
    Kind.PCIE: "ranks can push to peers, slower than plans take NVLink to be: `agmm tune`",
}


def gpu_links(core: Any) -> Matrix | None:
    """The links between the GPUs that this process sees; None where there are fewer than two, or
    NVML cannot be asked."""
    count = 0 if torch is None else torch.cuda.device_count()
    if count < 2 or devices.why_unknown() is not None or core is None:
        return None
    from agmm.runtime import links

    uuids = [links.uuid(index) for index in range(count)]
    reports = {uuid: devices.links_of(uuid, uuids) for uuid in uuids}
    known = {uuid: report for uuid, report in reports.items() if report is not None}
    if len(known) < count:
        return None
    return [
        [
            link._replace(peer=a == b or torch.cuda.can_device_access_peer(a, b))
            for b, link in enumerate(row)
        ]
        for a, row in enumerate(matrix_of(known))
    ]


def finding(core: Any) -> Finding:
    name = "GPU links"
    count = torch.cuda.device_count()
    if count < 2:
        return Finding(name, "-", "nothing to link")
    links = gpu_links(core)
    kind = None if links is None else kind_of(links)
    known = "" if links is None or kind is None else _kind_in_words(kind, links)
    seen = f"; {known or f'active NVLinks per GPU: {_active_nvlinks(count)}'}"
    slow = None if kind is None else _LINKS_MEAN.get(kind)
    without = pairs_without_access()
    if without:
        found = f"no peer access between {', '.join(f'{i}-{j}' for i, j in without)}{seen}"
        means = [mean for mean in ("such pairs take all-gather + matmul", slow) if mean]
        return Finding(name, found, "; ".join(means), "note")
    lossy = _pairs_without_atomics(core)
    if lossy:
        pairs = ", ".join(f"{i}-{j}" for i, j in lossy)
        found = f"peer access between all pairs, no native atomics between {pairs}{seen}"
        means = [m for m in ("such groups take copy engines, never SM push", slow) if m]
        return Finding(name, found, "; ".join(means), "note")
    found = f"peer access between all pairs{seen}"
    if slow is not None:
        return Finding(name, found, slow, "note")
    return Finding(name, found, "ranks can push to peers")


def _kind_in_words(kind: Kind, links: Matrix) -> str:
    halves = quads(links)
    parts: Sequence[Sequence[int]] = ()
    if halves is not None:
        parts = [sorted(half) for half in halves]
    elif kind in (Kind.PAIRS, Kind.PARTIAL):
        parts = [island for island in islands(links) if len(island) > 1]
    of = ", ".join("-".join(map(str, part)) for part in parts)
    words = f"{kind.value}{f' of {of}' if of else ''}"
    if kind not in FULLY_CONNECTED and schedule_of(links) is not None:
        words += "; pairs without NVLink have a GPU between them with links to both"
    return words


def pairs_without_access() -> list[tuple[int, int]]:
    count = torch.cuda.device_count()
    return [
        (i, j)
        for i in range(count)
        for j in range(count)
        if i != j and not torch.cuda.can_device_access_peer(i, j)
    ]


def _pairs_without_atomics(core: Any) -> list[tuple[int, int]]:
    if core is None or not core.cuda_built:
        return []
    from agmm.runtime import links

    try:
        return links.pairs_without_atomics()
    except RuntimeError:  # the driver does not say
        return []


def _active_nvlinks(count: int) -> str:
    unknown = devices.why_unknown()
    if unknown is not None:
        return f"unknown, since {unknown}"
    from agmm.runtime import links

    found = [devices.active_nvlinks(links.uuid(index)) for index in range(count)]
    return ", ".join("unknown" if active is None else str(active) for active in found)
