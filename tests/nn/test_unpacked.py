"""A packed linear that is taken apart, on ranks and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unpacked_work

from agmm.errors import InvalidArgument
from agmm.nn import UnpackedLinear, full_state_dict
from agmm.testing.ranks import RankPool


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("by_style", [False, True])
def test_an_attention_with_a_packed_linear(
    pool: RankPool, world_size: int, bias: bool, sequence: bool, by_style: bool
) -> None:
    found = pool.run(unpacked_work.attention, world_size, bias, sequence, by_style)
    assert [faults for faults in found if faults is not None] == [[]] * world_size


@pytest.mark.parametrize("bias", [False, True])
def test_alone_it_is_the_packed_linear(bias: bool) -> None:
    packed = torch.nn.Linear(8, 24, bias=bias).double().eval().requires_grad_(False)
    unpacked = UnpackedLinear(packed, [16, 4, 4])
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(unpacked(x), packed(x))
    assert not unpacked.training
    assert not any(parameter.requires_grad for parameter in unpacked.parameters())

    other = torch.nn.Linear(8, 24, bias=bias).double()
    unpacked.load_state_dict(other.state_dict())
    torch.testing.assert_close(unpacked(x), other(x))
    assert list(full_state_dict(unpacked)) == list(other.state_dict())
    again = UnpackedLinear(packed, [8, 8, 8])
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        again.load_state_dict(unpacked.state_dict())


def test_it_may_be_made_without_memory() -> None:
    with torch.device("meta"):
        packed = torch.nn.Linear(8, 24)
    assert all(parameter.is_meta for parameter in UnpackedLinear(packed, [12, 12]).parameters())


class _Other(torch.nn.Linear):
    pass


def _spectral() -> torch.nn.Linear:
    linear: torch.nn.Linear = torch.nn.utils.spectral_norm(torch.nn.Linear(8, 24))
    return linear


def _hooked() -> torch.nn.Linear:
    linear = torch.nn.Linear(8, 24)
    linear.register_forward_hook(lambda _module, _args, out: 2 * out)
    return linear


@pytest.mark.parametrize(
    ("linear", "sizes", "message"),
    [
        (
            _Other(8, 24),
            [12, 12],
            r"^linear: found test_unpacked\._Other, wanted torch\.nn",
        ),
        (torch.nn.Linear(8, 24), [12, 4], r"^sizes: found \[12, 4\], wanted sizes that add up to"),
        (torch.nn.Linear(8, 24), [], r"^sizes: found \[\]"),
        (torch.nn.Linear(8, 24), [24, 0], r"^sizes: found \[24, 0\]"),
        (_spectral(), [12, 12], "^linear: found .*weight_orig.*, wanted a weight and a bias alone"),
        (_hooked(), [12, 12], "^linear: found a hook, wanted a weight and a bias alone"),
    ],
)
def test_what_is_refused(linear: Any, sizes: list[int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        UnpackedLinear(linear, sizes)
