"""A linear that computes several outputs side by side, taken apart so that ranks can share each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from agmm.errors import InvalidArgument
from agmm.nn._held import Held


class UnpackedLinear(torch.nn.Module):
    """A packed ``torch.nn.Linear``, as of queries, keys and values, made of one linear each.

    Takes its place in a model, and returns what it would return: the outputs one beside the other.
    The linears are its children ``"0"``, ``"1"`` and so on, to which parallel styles are applied;
    each rank then returns its columns of each output, where it would be the first columns of all
    for a packed linear. `full_state_dict` and `load_full_state_dict` have the names of the packed
    linear, and ``load_state_dict`` takes them before a style is applied.

    Args:
        linear: the packed linear, whose values are copied.
        sizes: the columns of each output, in order.

    Raises:
        InvalidArgument: another module, one with hooks or a weight that is computed, or sizes that
            are not all of its columns.
    """

    def __init__(self, linear: torch.nn.Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        if type(linear) is not torch.nn.Linear:
            kind = type(linear)
            raise InvalidArgument(
                f"linear: found {kind.__module__}.{kind.__qualname__}, wanted torch.nn.Linear"
            )
        lost = [name for name, _ in linear.named_parameters() if name not in ("weight", "bias")]
        lost += [name for name, _ in linear.named_buffers()]
        lost += ["a hook"] * bool(linear._forward_hooks or linear._forward_pre_hooks)
        if lost:
            raise InvalidArgument(
                f"linear: found {', '.join(lost)}, wanted a weight and a bias alone"
            )
        self.sizes = tuple(sizes)
        if min(self.sizes, default=0) < 1 or sum(self.sizes) != linear.out_features:
            raise InvalidArgument(
                f"sizes: found {list(self.sizes)}, wanted sizes that add up to the "
                f"{linear.out_features} columns of the linear"
            )
        given = {
            name: parameter.detach().split(self.sizes)
            for name, parameter in linear.named_parameters()
        }
        for i, size in enumerate(self.sizes):
            with torch.device("meta"):  # no values are drawn, which are replaced
                part = torch.nn.Linear(linear.in_features, size, bias="bias" in given)
            for name, values in given.items():
                wanted = linear.get_parameter(name).requires_grad
                part.register_parameter(name, torch.nn.Parameter(values[i].clone(), wanted))
            self.add_module(str(i), part)
        self.held = {
            name: Held(self._pieces(name), self.sizes, Shard(0))  # by styles that divide outputs
            for name in given
        }
        self.train(linear.training)

    @classmethod
    def in_place_of(cls, linear: torch.nn.Linear, sizes: Sequence[int]) -> UnpackedLinear:
        """Makes the packed linear itself, wherever a model holds it, the one that this class would
        make of it.

        Raises:
            InvalidArgument: what the class refuses; nothing is changed then.
        """
        made = cls(linear, sizes)
        linear.__class__ = cls  # type: ignore[assignment]
        linear.__dict__.clear()
        linear.__dict__.update(made.__dict__)
        return linear  # type: ignore[return-value]

    def _pieces(self, name: str) -> tuple[str, ...]:
        return tuple(f"{i}.{name}" for i in range(len(self.sizes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of the linears, one beside the other; of this rank, where it has a shard."""
        return torch.cat([part(x) for part in self.children()], dim=-1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, held in self.held.items():
            packed = state_dict.get(prefix + name)
            if packed is not None and packed.shape[:1] == (sum(self.sizes),):
                del state_dict[prefix + name]
                pieces = held.split(packed)
                state_dict.update({prefix + piece: value for piece, value in pieces.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)
