"""The order of rows of experts by a kernel, on the GPUs that agmm has it for."""

from __future__ import annotations

import torch

from agmm import _core
from agmm.runtime import capabilities
from agmm.runtime.streams import stream_of

_IDS = {torch.int32: _core.RouteIds.int32, torch.int64: _core.RouteIds.int64}
"""The dtypes of ids that the kernel reads."""


def routed(
    ids: torch.Tensor,
    num_experts: int,
    first: int,
    experts: int,
    capacity: int,
    *,
    checks_capacity: bool,
) -> tuple[torch.Tensor, ...] | None:
    """Return what `agmm.ops.routing.rows_of` returns, by one launch on the current stream; None
    where there is no kernel for it. An id that is too large ends in an assertion of the device.

    Args:
        ids: [tokens of all ranks, k], contiguous.
        num_experts: the experts of all ranks.
        first: the first expert of this rank.
        experts: how many experts each rank has.
        capacity: the rows of the result.
        checks_capacity: whether more rows of any rank than that end in an assertion as well.
    """
    given = _IDS.get(ids.dtype)
    if (
        not ids.is_cuda
        or given is None
        or max(experts, num_experts // experts) > _core.MOST_ROUTED_EXPERTS
        or capabilities.why_not(capabilities.ROUTING, ids.device) is not None
    ):
        return None
    with torch.cuda.device(ids.device):
        most = _core.most_routed_choices()
        if not 0 < ids.numel() <= most or capacity > most:
            return None
        shapes = (capacity,), (capacity,), (experts,), (experts + 1,), ids.shape
        found = tuple(ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
        _core.route_rows(
            given,
            (ids.numel(), ids.shape[1], num_experts, first, experts, capacity),
            checks_capacity,
            (ids.data_ptr(), *(tensor.data_ptr() for tensor in found)),
            stream_of(ids.device),
        )
    return found
