"""The style of a packed linear, of whose outputs each rank computes its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.errors import InvalidArgument
from agmm.nn._targets import Target
from agmm.nn.packed import UnpackedLinear
from agmm.nn.replicated import ReplicatedColwiseParallel
from agmm.nn.styles import SharedGatherParallel


class PackedColwiseParallel(ParallelStyle):
    """``torch.nn.Linear`` that computes several outputs side by side, each of which is sharded.

    Applied to the packed linear, which becomes an `UnpackedLinear` where it is: it returns this
    rank's columns of each output, one beside the other, as tensors. `full_state_dict` and
    `load_full_state_dict` have the packed names and shapes.

    Args:
        sizes: the columns of each output, in order; a number stands for so many of one size.
        sequence_dim: the dimension of the input that is sharded; the outputs share one gather.
            None where the input is the same on all ranks.
        **options: ``save_gathered``, ``strict`` and ``fp8``, as of `GatherColwiseParallel`, with a
            ``sequence_dim`` alone.
    """

    def __init__(
        self, sizes: int | Sequence[int] = 2, *, sequence_dim: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        if sequence_dim is None and options:
            raise InvalidArgument(
                f"PackedColwiseParallel: found {', '.join(options)} without a sequence_dim, wanted "
                "none of them"
            )
        self.sizes = sizes if isinstance(sizes, int) else tuple(sizes)
        self.sequence_dim = sequence_dim
        self.options = options

    def names_in(self, name: str = "") -> list[str]:
        """The names of the parts of a linear of that name."""
        count = self.sizes if isinstance(self.sizes, int) else len(self.sizes)
        return [f"{name}.{i}".lstrip(".") for i in range(count)]

    def unpack(self, linear: torch.nn.Module, mesh: DeviceMesh, name: str = "") -> None:
        """Makes the linear an `UnpackedLinear`, whose parts have no style yet.

        Raises:
            InvalidArgument: the ranks cannot share each output, or it is no such linear.
        """
        sizes = self.checked(linear, mesh, name)
        UnpackedLinear.in_place_of(linear, sizes)  # type: ignore[arg-type]

    def checked(self, linear: torch.nn.Module, mesh: DeviceMesh, name: str = "") -> list[int]:
        """The columns of each output, which the ranks can share.

        Raises:
            InvalidArgument: they cannot, or it is no such linear.
        """
        target = Target(self, linear, name).checked(mesh, "out_features", None)
        if target.fp8 is not None:
            raise target.fault(f"fp8: found {target.fp8.name}, wanted a torch.nn.Linear without it")
        total: int = linear.out_features  # type: ignore[assignment]
        ranks = mesh.size()
        sizes = [total // self.sizes] * self.sizes if isinstance(self.sizes, int) else self.sizes
        if sum(sizes) != total or any(size < 1 or size % ranks for size in sizes):
            raise target.fault(
                f"sizes: found {list(sizes)}, wanted multiples of {ranks} ranks that add up to the "
                f"{total} columns of the linear"
            )
        return list(sizes)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.unpack(module, device_mesh)
        names = self.names_in()
        if self.sequence_dim is None:
            styles: list[tuple[ParallelStyle, torch.nn.Module]] = [
                (ReplicatedColwiseParallel(), module.get_submodule(name)) for name in names
            ]
        else:
            options: dict[str, Any] = {"sequence_dim": self.sequence_dim, **self.options}
            styles = [(SharedGatherParallel(*names, whole_shape=False, **options), module)]
        for style, where in styles:
            style.src_data_rank = self.src_data_rank
            style._apply(where, device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sizes!r}, sequence_dim={self.sequence_dim})"
