"""Who multiplies fp8 rows of experts that are there: agmm's kernel or torch's grouped matmul. The
calls of both are caught, so no GPU is wanted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agmm.ops import grouped_kernel
from agmm.ops.grouped_scaled_products import ScaledWeight, scaled_product_on_gpu
from agmm.runtime.scaled import Scaled
from agmm.runtime.scaling import BY_NAME, scale_shape

E4M3 = torch.float8_e4m3fn
N, K, EXPERTS = 32, 256, 2
KERNEL, TORCH = 1.0, 2.0
"""What the caught calls of each return, everywhere."""


def operands(rows: int, kind: str, out: torch.dtype, n: int = N) -> tuple[Scaled, ScaledWeight]:
    scaling = BY_NAME[kind]
    values = torch.zeros(rows, K).to(E4M3)
    weight = torch.zeros(EXPERTS, n, K).to(E4M3).mT
    scales = [
        torch.ones(scale_shape(one.shape, kind_of))
        for one, kind_of in ((values, scaling.a), (weight, scaling.b))
    ]
    made = ScaledWeight(weight, scales[1], None, scaling, out, False)
    return Scaled(values, scales[0], scaling.a), made


@pytest.fixture
def is_built(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the build has the kernel, which a test may set to False."""
    found = {"kernel": True}

    def config_of(*given: Any) -> Any:
        return SimpleNamespace(name="kernel") if found["kernel"] else None

    def launch(call: Any, *given: Any, **settings: Any) -> Any:
        return call.out.fill_(KERNEL)

    def by_torch(rows: torch.Tensor, weight: torch.Tensor, *given: Any, **settings: Any) -> Any:
        return torch.full((len(rows), weight.shape[2]), TORCH, dtype=settings["out_dtype"])

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "_scaled_grouped_mm", by_torch)
    monkeypatch.setattr(grouped_kernel, "config_of", config_of)
    monkeypatch.setattr(grouped_kernel, "launch", launch)
    return found


@pytest.mark.parametrize(
    ("rows", "kind", "out", "has_kernel", "wanted"),
    [
        (128, "rowwise", torch.bfloat16, True, KERNEL),
        (129, "rowwise", torch.bfloat16, True, TORCH),
        (4096, "block", torch.bfloat16, True, KERNEL),  # torch has no such product
        (128, "rowwise", torch.float32, True, TORCH),  # the kernel writes bfloat16
        (128, "rowwise", torch.bfloat16, False, TORCH),
    ],
)
def test_who_multiplies_rows_that_are_there(
    rows: int,
    kind: str,
    out: torch.dtype,
    has_kernel: bool,
    wanted: float,
    is_built: dict[str, bool],
) -> None:
    is_built["kernel"] = has_kernel
    given, weight = operands(rows, kind, out)
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    found = scaled_product_on_gpu(given, weight, offsets)
    assert found.dtype == out and bool((found == wanted).all())
