"""Parallel styles for transformers' registry.

A style there has ``validate_param``, ``shard_param`` and ``install_forward``. Those of linears take
the place of the module's forward, and leave to the style that they replace how parameters are
sharded, and what they cannot serve. Those of a region of sequence parallelism learn from the layer
around them how the rows of this forward are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from agmm.errors import InvalidArgument, warn_once
from agmm.integrations.low_rank import LowRank
from agmm.integrations.sequence_rows import (
    Rows,
    all_rows,
    mark,
    own_rows,
    rows_of,
)
from agmm.nn import ReplicatedColwiseParallel, RowwiseAllReduceParallel
from agmm.nn._column_product import column_product
from agmm.nn._filled import filled_up
from agmm.nn._gated_form import gated_form, has_hooks
from agmm.nn._ranks import Ranks
from agmm.nn._stand_in import StandIn, stand_in
from agmm.nn._summed_gradients import summed_gradients
from agmm.nn._targets import BY_INPUTS, BY_OUTPUTS, Target
from agmm.ops.all_gather_matmul import all_gather_matmul
from agmm.ops.matmul_all_reduce import matmul_all_reduce
from agmm.ops.matmul_reduce_scatter import matmul_reduce_scatter
from agmm.runtime.epilogues import GatedActivation

FEW_ROWS = 128
"""With fewer rows (batch × sequence) every rank keeps all of them, as when tokens are generated."""

_REFUSAL = (
    "sequence_plan: found a module that calls ",
    " on its input, wanted one whose column-wise linears alone take it",
)
_SERVED = "_agmm_forward"
_ROW, _COLUMN = RowwiseAllReduceParallel(), ReplicatedColwiseParallel()


class Region:
    """What the styles inside one layer share.

    Attributes:
        rows: how the rows are divided that the layer was last called with.
        sublayer_rows: those of the sublayer that runs; None where it has all rows, and where none
            runs.
        stand_in: what the linears of a module get as its input.
        shard: this rank's rows of that input.
        products: of these linears.
    """

    def __init__(self) -> None:
        self.rows: Rows | None = None
        self.sublayer_rows: Rows | None = None
        self.stand_in: StandIn | None = None
        self.shard: torch.Tensor | None = None
        self.products: dict[torch.nn.Module, torch.Tensor] = {}


class _Forward:
    """Takes the place of a module's forward."""

    def __init__(self, module: torch.nn.Module, ranks: Ranks) -> None:
        self.module = module
        self.ranks = ranks
        self.original = module.forward
        self.region = Region()
        setattr(module, _SERVED, self)
        module.forward = self

    def _rows(self, x: torch.Tensor) -> Rows | None:
        """How the rows of an input are divided; None where it has all of them.

        What enters a layer knows it. Inside, a shard of the rows is known by its two dimensions.
        Modules do not rely on the layer's own call, which checkpointing may leave out when it
        computes again.
        """
        rows = rows_of(x)
        if rows is not None:
            self.region.rows = rows
        return self.region.rows if x.dim() == 2 else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _served(module: torch.nn.Module) -> _Forward | None:
    found = module.__dict__.get(_SERVED)
    return found if isinstance(found, _Forward) else None


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _with_input(
    x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


class _Column(_Forward):
    by_columns = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.region.stand_in is x:
            return self.region.products[self.module]
        weight, bias = Target(_COLUMN, self.module).local_parameters(BY_OUTPUTS)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Replicate()]).to_local()
        return column_product(x, weight.t(), bias, self.ranks.for_ops)

    def low_rank_product(self, x: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        """What an adapter adds to the output of this call."""
        shard, rows = self.region.shard, self.region.sublayer_rows
        if self.region.stand_in is not x or shard is None or rows is None:
            return adapter.of_all_rows(x)
        out = adapter.gathered(shard)[: rows.total]
        found: torch.Tensor = out.unflatten(0, tuple(rows))
        return found


class _Row(_Forward):
    by_columns = False

    def __init__(self, module: torch.nn.Module, ranks: Ranks, splits_input: bool) -> None:
        super().__init__(module, ranks)
        self.splits_input = splits_input

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features of the input."""
        if self.splits_input and not isinstance(x, DTensor):
            mesh = self.ranks.mesh(x.device)
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(-1)]).to_local()
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = Target(_ROW, self.module).local_parameters(BY_INPUTS)
        x = self._features(x)
        group = self.ranks.for_ops
        if self.region.sublayer_rows is None:
            return matmul_all_reduce(x, weight, group, bias=bias)
        rows = filled_up(x.flatten(0, -2), self.ranks.size)
        return matmul_reduce_scatter(rows, weight, group, bias=bias)

    def low_rank_product(self, x: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        """What an adapter adds to the output of this call."""
        x = self._features(x)
        if self.region.sublayer_rows is None:
            return adapter.summed(x)
        return adapter.scattered(filled_up(x.flatten(0, -2), self.ranks.size))


def served_linear(module: torch.nn.Module) -> _Column | _Row | None:
    """What takes the place of a linear's forward."""
    found = _served(module)
    return found if isinstance(found, _Column | _Row) else None


class _Layer(_Forward):
    """A decoder layer: the region begins before the first one."""

    bound = False

    def _bind(self) -> None:
        for module in self.module.modules():
            inner = _served(module)
            if inner is not None:
                inner.region = self.region
        self.bound = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.bound:
            self._bind()
        x = _input(args, kwargs)
        rows = rows_of(x)
        if rows is None:
            if x.dim() != 3:
                raise InvalidArgument(
                    f"hidden_states: found {x.dim()} dimensions and no note of what they are part "
                    "of, wanted [batch, sequence, features] or what another layer returned; "
                    "checkpointing keeps that with use_reentrant=False"
                )
            if x.shape[0] * x.shape[1] < FEW_ROWS:
                return self.original(*args, **kwargs)
            rows = Rows(x.shape[0], x.shape[1])
            x = own_rows(x.flatten(0, 1), self.ranks)
            mark(x, rows)
        args, kwargs = _with_input(x, args, kwargs)
        out = self.original(*args, **kwargs)
        mark(_first(out), rows)
        return out


class _Norm(_Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = self._rows(_input(args, kwargs))
        if rows is None:
            return self.original(*args, **kwargs)
        with summed_gradients(self.module, self.ranks):
            return self.original(*args, **kwargs)


class _LastNorm(_Forward):
    """The norm behind the last layer, with which the region ends."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = rows_of(_input(args, kwargs))
        if rows is None:
            return self.original(*args, **kwargs)
        with summed_gradients(self.module, self.ranks):
            shard = self.original(*args, **kwargs)
        return all_rows(shard, rows.total, self.ranks).unflatten(0, tuple(rows))


class _Sublayer(_Forward):
    """A part of a layer between norms: attention, or a feed-forward network."""

    columns: list[torch.nn.Module] | None = None

    def __init__(self, module: torch.nn.Module, ranks: Ranks) -> None:
        super().__init__(module, ranks)
        self.form = gated_form(module)

    def _find_columns(self) -> list[torch.nn.Module]:
        """The linears that take the sublayer's input; none where some cannot be served here."""
        children = (getattr(m, "base_layer", m) for m in self.module.children())  # of adapters
        linears = [m for m in children if isinstance(m, torch.nn.Linear)]
        if not all(isinstance(_served(m), _Column | _Row) for m in linears):
            return []
        if not any(isinstance(_served(m), _Row) for m in linears):
            return []
        return [m for m in linears if isinstance(_served(m), _Column)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = _input(args, kwargs)
        rows = self._rows(x)
        if rows is None:
            return self.original(*args, **kwargs)
        if self.columns is None:
            self.columns = self._find_columns()
        if not self.columns:
            return self._with_all_rows(rows, x, args, kwargs)
        region, gated = self.region, self._gated_linears()
        if gated is not None and self.form is not None:
            (hidden,) = self._products(x, rows, gated, self.form.activation)
            region.sublayer_rows = rows
            try:
                return self.module.get_submodule(self.form.down)(hidden)
            finally:
                region.sublayer_rows = None
        wholes = self._products(x, rows, self.columns, None)
        region.products = dict(zip(self.columns, wholes, strict=True))
        region.stand_in = stand_in(x, (*rows, x.shape[-1]), _REFUSAL)
        region.shard, region.sublayer_rows = x, rows
        args, kwargs = _with_input(region.stand_in, args, kwargs)
        try:
            return self.original(*args, **kwargs)
        finally:
            region.stand_in, region.shard, region.sublayer_rows = None, None, None
            region.products = {}

    def _gated_linears(self) -> list[torch.nn.Module] | None:
        """The linears of gate and up where the sublayer is a gated feed-forward that calls them."""
        if self.form is None:
            return None
        linears = [self.module.get_submodule(name) for name in (self.form.gate, self.form.up)]
        is_theirs = all(isinstance(_served(one), _Column) and not has_hooks(one) for one in linears)
        return linears if is_theirs else None

    def _products(
        self,
        x: torch.Tensor,
        rows: Rows,
        linears: Sequence[torch.nn.Module],
        activation: GatedActivation | None,
    ) -> list[torch.Tensor]:
        """What the linears return of all rows; with an activation the one result of gate and up."""
        operands = [Target(_COLUMN, one).local_parameters(BY_OUTPUTS) for one in linears]
        weights, biases = zip(*operands, strict=True)
        found: Any = all_gather_matmul(
            x, list(weights), self.ranks.for_ops, bias=list(biases), activation=activation
        )
        outs = [found] if activation else found
        return [out[: rows.total].unflatten(0, tuple(rows)) for out in outs]

    def _with_all_rows(
        self, rows: Rows, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The sublayer as transformers has it, between a gather and each rank's own shard."""
        whole = all_rows(x, rows.total, self.ranks).unflatten(0, tuple(rows))
        args, kwargs = _with_input(whole, args, kwargs)
        out = self.original(*args, **kwargs)
        shard = own_rows(_first(out).flatten(0, 1), self.ranks)
        return (shard, *out[1:]) if isinstance(out, tuple) else shard


class LinearStyle:
    """A style of transformers for linears, served by agmm where the module is ``torch.nn.Linear``
    and its size divides by the ranks. All else is the style's that it replaces."""

    def __init__(self, name: str, stock: Any) -> None:
        self.name = name
        self.stock = stock

    def __getattr__(self, name: str) -> Any:
        if name == "stock":  # of a copy that is still empty
            raise AttributeError(name)
        return getattr(self.stock, name)

    def _why_not(self, module: torch.nn.Module, mesh: DeviceMesh) -> str | None:
        if type(module) is not torch.nn.Linear:
            kind = type(module)
            return f"found {kind.__module__}.{kind.__qualname__}, wanted torch.nn.Linear itself"
        divided = "out_features" if self.name == "colwise" else "in_features"
        size = getattr(module, divided)
        if size % mesh.size():
            return f"{divided}: found {size}, wanted a multiple of {mesh.size()} ranks"
        return None

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Replaces the module's forward, before transformers loads its parameters."""
        why_not = self._why_not(module, mesh)
        if why_not is not None:
            if isinstance(module, torch.nn.Linear):
                warn_once(f"agmm leaves a linear to transformers: {self.name}: {why_not}")
            self.stock.install_forward(module, mesh)
        elif self.name == "colwise":
            _Column(module, Ranks(mesh, None))
        else:
            _Row(module, Ranks(mesh, None), isinstance(self.stock.input_layouts, Replicate))
        return module


class SequenceStyle:
    """A style of a region of sequence parallelism, which shards no parameter."""

    def __init__(self, forward: type[_Forward]) -> None:
        self.forward = forward

    def validate_param(
        self, module: torch.nn.Module, param: str, mesh: DeviceMesh, parameter_name: Any = None
    ) -> None:
        """Every parameter will do."""

    def shard_param(self, module: torch.nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Every rank holds it whole."""

    def install_forward(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        """Replaces the module's forward."""
        self.forward(module, Ranks(mesh, None))
        return module


LINEAR_STYLES = ("colwise", "rowwise", "rowwise_rep", "rowwise_split_input")
LAYER, NORM, LAST_NORM, SUBLAYER = (
    f"agmm_sequence_{name}" for name in ("layer", "norm", "last_norm", "sublayer")
)
SEQUENCE_STYLES = {LAYER: _Layer, NORM: _Norm, LAST_NORM: _LastNorm, SUBLAYER: _Sublayer}
