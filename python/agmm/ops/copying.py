"""Copies of operands that kernels do not read as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from agmm import _core
from agmm.runtime.cuda_calls import b_layout


class Copying(NamedTuple):
    """How operands become what a kernel reads. Copies are made, and no other path is taken, since
    strides differ between ranks and the path must not."""

    dim: int
    column_major: bool

    @classmethod
    def of(cls, As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor], dim: int) -> Copying | None:
        """None for operands that kernels read as they are."""
        layouts = [b_layout(B) for B in Bs]
        column_major = all(layout is not None and layout.column_major for layout in layouts)
        found = cls(dim, column_major)
        is_as_given = dim == 0 and all(A.is_contiguous() for A in As)
        return None if is_as_given and all(map(found._is_read, Bs)) else found

    def _is_read(self, B: torch.Tensor) -> bool:
        layout = b_layout(B)
        return layout is not None and (self.column_major, 0) == (
            layout.column_major,
            layout.leading % _core.ALIGNMENT,
        )

    def weight(self, B: torch.Tensor) -> torch.Tensor:
        """The weight as TMA wants it."""
        if self._is_read(B):
            return B
        return B.t().contiguous().t() if self.column_major else B.contiguous()

    def __call__(
        self, As: Sequence[torch.Tensor], Bs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        As = [A.movedim(self.dim, 0).contiguous() for A in As]
        return As, [self.weight(B) for B in Bs]
