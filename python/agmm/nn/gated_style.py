"""The style of gated feed-forward modules: one gather for gate and up, whose product is computed
with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from agmm.errors import InvalidArgument
from agmm.nn._gated_form import GatedForm, gated_form, has_hooks
from agmm.nn._ranks import Ranks
from agmm.nn._targets import Target
from agmm.nn.fp8_recipe import Fp8Recipe
from agmm.nn.gathered import gathered_products
from agmm.nn.packed import UnpackedLinear
from agmm.nn.packed_style import PackedColwiseParallel
from agmm.nn.styles import RowwiseScatterParallel, SharedGatherParallel


class GatedGatherParallel(SharedGatherParallel):
    """A module that computes ``down(activation(gate(x)) * up(x))`` of ``torch.nn.Linear`` modules.

    Applied to the module. Its linears and its activation are found in what its forward does,
    whatever their names; one linear may compute gate and up side by side. `agmm.all_gather_matmul`
    multiplies both and computes the activation, as in `GatedMLP`. ``down`` has a style of its own,
    as `RowwiseScatterParallel`; `gated_plan` gives both. Checkpoints are the module's, for a packed
    linear as `UnpackedLinear` has them.

    Where gate or up has hooks, or another module has taken its place, as that of an adapter, the
    module computes as its class does, with one gather still.

    Args:
        save_preactivation: see `agmm.all_gather_matmul`; ``True`` with fp8.
        **options: ``sequence_dim``, ``use_local_output``, ``save_gathered``, ``strict`` and
            ``fp8``, as of `GatherColwiseParallel`.
    """

    def __init__(self, *, save_preactivation: bool = True, **options: Any) -> None:
        super().__init__("gate", "up", whole_shape=False, **options)
        self.save_preactivation = save_preactivation

    def __repr__(self) -> str:
        # It has no names before it has seen a module.
        return f"{type(self).__name__}(sequence_dim={self.sequence_dim})"

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        form = None if "forward" in module.__dict__ else gated_form(module)
        if form is None:
            kind = type(module)
            raise InvalidArgument(
                f"GatedGatherParallel: found {kind.__module__}.{kind.__qualname__}, wanted a "
                "module that computes down(activation(gate(x)) * up(x)), with SiLU or GELU"
            )
        if self.fp8 is not None and not self.save_preactivation:
            raise InvalidArgument(
                "GatedGatherParallel: save_preactivation: found False with fp8, wanted True"
            )
        names = [form.gate, form.up]
        if form.is_packed:
            packed = PackedColwiseParallel()
            packed.unpack(module.get_submodule(form.gate), device_mesh, form.gate)
            names = packed.names_in(form.gate)
        targets = self._targets_in(module, names, device_mesh)
        ranks = self._share(module, targets, device_mesh)
        given = self, form, module, targets, ranks, module.forward
        module.forward = partial(_gated, *given)
        return module


def _gated(
    style: GatedGatherParallel,
    form: GatedForm,
    module: torch.nn.Module,
    targets: Sequence[Target],
    ranks: Ranks,
    plain: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The module's forward, of its one argument."""
    if not _are_in_place(form, module, targets):
        return plain(*args, **kwargs)
    (x,) = (*args, *kwargs.values())
    (hidden,) = gathered_products(
        targets,
        style,
        ranks,
        x,
        activation=form.activation,
        save_preactivation=style.save_preactivation,
    )
    return module.get_submodule(form.down)(hidden)


def _are_in_place(form: GatedForm, module: torch.nn.Module, targets: Sequence[Target]) -> bool:
    """Whether the module calls the linears that were styled, and nothing with them."""
    names = form.gate, form.up
    if form.is_packed:
        module, names = module.get_submodule(form.gate), ("0", "1")
        if not isinstance(module, UnpackedLinear) or has_hooks(module):
            return False
    for name, target in zip(names, targets, strict=True):
        if module._modules.get(name) is not target.module or has_hooks(target.module):
            return False
    return True


def gated_plan(
    module: torch.nn.Module,
    *,
    sequence_dim: int = 1,
    use_local_output: bool = True,
    strict: bool = False,
    fp8: str | Fp8Recipe | None = None,
    save_preactivation: bool = True,
) -> dict[str, ParallelStyle]:
    """The entries of a plan for the gated feed-forward modules of a model, with sequence
    parallelism.

    For ``parallelize_module(model, mesh, plan | gated_plan(model))``: each module gets
    `GatedGatherParallel`, and its last linear `RowwiseScatterParallel`. Modules that compute
    anything else are left out, as those with dropout.

    Args:
        module: that the plan is for, not sharded yet.
        sequence_dim: the dimension of the rows that is sharded.
        use_local_output: return tensors, not DTensors, from the last linears.
        strict: of both styles.
        fp8: of both styles.
        save_preactivation: see `agmm.all_gather_matmul`.

    Raises:
        InvalidArgument: there is no such module.
    """
    found: dict[str, ParallelStyle] = {}
    of_both: dict[str, Any] = {"sequence_dim": sequence_dim, "strict": strict, "fp8": fp8}
    for name, one in module.named_modules():
        form = gated_form(one)
        if form is not None:
            gated = GatedGatherParallel(save_preactivation=save_preactivation, **of_both)
            down = RowwiseScatterParallel(use_local_output=use_local_output, **of_both)
            found |= {name: gated, f"{name}.{form.down}".lstrip("."): down}
    if not found:
        raise InvalidArgument(
            f"module: found no gated feed-forward in {type(module).__name__}, wanted modules that "
            "compute down(activation(gate(x)) * up(x)), with SiLU or GELU"
        )
    return found
