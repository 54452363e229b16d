"""Every op of agmm with operands for it: what tests of a promise that all ops make go through.

`names` finds the ops, `calls` has calls of each; `test_every_op.py` compares them, so that an op
that is new cannot be forgotten.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import packed_work
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import agmm
from agmm import collectives
from agmm.integrations import async_tp

_Settings = dict[str, Any]

K, N = 32, 16
E4M3 = torch.float8_e4m3fn


def _public() -> dict[str, Callable[..., Any]]:
    """The public functions that take tensors, by their names."""
    found: dict[str, Callable[..., Any]] = {}
    for module in (agmm, collectives, agmm.moe):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function) and tensors_of(function):
                found[f"{module.__name__}.{name}"] = function
    return found


def tensors_of(op: Any) -> list[str]:
    """The names of the arguments of a function or of a torch op that are tensors or lists of them;
    groups and settings are none."""
    if inspect.isfunction(op):
        parameters = inspect.signature(op).parameters.values()
        kinds = [(parameter.name, str(parameter.annotation)) for parameter in parameters]
        return [name for name, kind in kinds if "Tensor" in kind or "_Operand" in kind]
    return [argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)]


PUBLIC = _public()
REGISTERED = sorted(
    name for name in torch._C._dispatch_get_all_op_names() if name.startswith("agmm::")
)
SERVED = [op.name for op in async_tp.OPS]
"""torch's ops that agmm serves while `agmm.async_tp` is enabled."""


def names() -> list[str]:
    return [*PUBLIC, *REGISTERED, *SERVED]


def op_named(name: str) -> Any:
    """The function, or the torch op."""
    if "::" not in name:
        return PUBLIC[name]
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def arguments_of(name: str) -> list[str]:
    """The names of all arguments of the op."""
    op = op_named(name)
    if inspect.isfunction(op):
        return list(inspect.signature(op).parameters)
    return [argument.name for argument in op._schema.arguments]


class Call(NamedTuple):
    """A call of an op, with operands of its own."""

    op: str
    operands: dict[str, Any]
    """Tensors, None or lists of these, by the names of the op's arguments."""
    settings: _Settings
    flops: int
    """The FLOPs of the product on this rank."""
    has_backward: bool

    def __call__(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """The results that have elements, or that a handle returned."""
        op = op_named(self.op)
        given = {**self.operands, **self.settings}
        if inspect.isfunction(op):
            found = op(**given, group=group)
            if isinstance(found, collectives.Work):
                found = found.wait()
        else:
            given = {"group_name": group.group_name, "world_size": group.size(), **given}
            wanted = [argument.name for argument in op._schema.arguments]
            found = op(**{name: given[name] for name in wanted if name in given})
        return [t for t in tree_leaves(found) if isinstance(t, torch.Tensor) and t.numel()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All operands that may require gradients, with the names of their arguments."""
        for name, operand in self.operands.items():
            for tensor in operand if isinstance(operand, list) else [operand]:
                if isinstance(tensor, agmm.Packed4BitWeight):
                    tensor = tensor.packed
                if tensor is not None and tensor.is_floating_point():
                    yield name, tensor

    @property
    def saves_results(self) -> bool:
        """Whether the backward wants what the call returned."""
        saves_products = "::" in self.op and "save_preactivation" in self.settings
        # A routing is a result that the backward wants.
        saves_routing = self.op == "agmm.all_gather_grouped_matmul"
        is_norm = self.op.endswith("rms_norm")
        return is_norm or "save_gathered" in self.settings or saves_products or saves_routing

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{key}={value}' for key, value in self.settings.items())})"


class Sizes(NamedTuple):
    """What varies: the leading sizes of a shard, the dimension that is gathered or scattered, and
    the columns of each rank where it is the last one."""

    leading: tuple[int, ...] = (2, 3)
    dim: int = 0
    columns: int = 2

    @property
    def is_last(self) -> bool:
        return self.dim == len(self.leading)

    def whole(self, world_size: int) -> tuple[int, ...]:
        """The leading sizes of all shards together."""
        sizes = list(self.leading)
        if not self.is_last:
            sizes[self.dim] *= world_size
        return tuple(sizes)


class _Maker:
    """Makes the operands of a call, on one device, of one dtype."""

    def __init__(self, world_size: int, sizes: Sizes, device: str) -> None:
        self.world_size, self.sizes, self.device = world_size, sizes, device
        # The dtypes of which agmm's kernels make products.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.whole = sizes.whole(world_size)
        self.rows = prod(self.whole)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).to(self.device, self.dtype)

    def scales(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device) + 0.5

    def fp8(self, *shape: int) -> torch.Tensor:
        return self.numbers(*shape).to(E4M3)

    def weight(self, k: int = K, n: int = N) -> torch.Tensor:
        """In the layout that agmm's fp8 kernels want."""
        return self.fp8(n, k).t()

    def signals(self) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32, device=self.device).view(torch.uint32)


def calls(world_size: int, sizes: Sizes | None = None, device: str = "cpu") -> list[Call]:
    """Calls of all ops that can have those sizes, on every rank the same."""
    make = _Maker(world_size, sizes or Sizes(), device)
    return [
        *_gathers(make),
        *_scatters(make),
        *_without_a_dimension(make),
        *_collectives(make),
        *([] if make.sizes.dim or make.sizes.is_last else _of_experts(make)),
        *_fp8_scatters(make),
        *([] if make.sizes.is_last else _fp8_gathers(make)),
        *([] if make.sizes.is_last or device != "cpu" else _packed(make)),
    ]


def _gathers(make: _Maker) -> Iterator[Call]:
    sizes = make.sizes
    k = K * make.world_size if sizes.is_last else K
    dim: _Settings = {"gather_dim": sizes.dim}
    one, flops = "agmm.all_gather_matmul", 2 * make.rows * k * N

    def operands() -> dict[str, Any]:
        A_shard, B, bias = make.numbers(*sizes.leading, K), make.numbers(k, N), make.numbers(N)
        return {"A_shard": A_shard, "B": B, "bias": bias}

    def of_two(**names: str) -> dict[str, Any]:
        return {
            "A_shard": make.numbers(*sizes.leading, K),
            names["B"]: [make.numbers(k, N), make.numbers(k, 2 * N)],
            names["bias"]: [make.numbers(N), None],
        }

    yield Call(one, operands(), dim, flops, True)
    yield Call(one, operands(), dim | {"return_A": True, "save_gathered": True}, flops, True)
    for config in ("unfused", "portable", "streamed"):
        yield Call(one, operands(), dim | {"return_A": True, "config": config}, flops, True)
    both = of_two(B="B", bias="bias")
    yield Call(one, both, dim | {"return_A": True}, 3 * flops, True)
    settings = dim | {"return_A": True, "config": "", "strict": False}
    both = of_two(B="Bs", bias="biases")
    registered = "agmm::_all_gather_matmul"
    yield Call(registered, both, settings, 3 * flops, True)
    for op, B, bias in ((one, "B", "bias"), (registered, "Bs", "biases")):
        gated = of_two(B=B, bias=bias)
        gated[B] = [make.numbers(k, N), make.numbers(k, N)]
        activated = (dim if op == one else settings) | {"activation": "silu_mul"}
        activated["save_preactivation"] = True
        yield Call(op, gated, activated, 2 * flops, True)
    if sizes.dim == 0 and not sizes.is_last:
        two = operands()
        del two["bias"]
        yield Call("agmm::_fused_all_gather_matmul_native", two, {}, flops, True)
    if not sizes.is_last:
        served = {"A": make.numbers(*sizes.leading, K), "Bs": [make.numbers(K, N)]}
        settings = dim | {"return_A": True}
        yield Call("symm_mem::fused_all_gather_matmul", served, settings, 0, False)


def _scatters(make: _Maker) -> Iterator[Call]:
    sizes = make.sizes
    n = sizes.columns * make.world_size if sizes.is_last else N
    n_local = sizes.columns if sizes.is_last else N
    dim: _Settings = {"scatter_dim": sizes.dim}
    one, flops = "agmm.matmul_reduce_scatter", 2 * make.rows * K * n

    def operands(*, bias: bool) -> dict[str, Any]:
        found = {"A": make.numbers(*make.whole, K), "B": make.numbers(K, n)}
        return found | ({"bias": make.numbers(n)} if bias else {})

    def of_two(**names: str) -> dict[str, Any]:
        return {
            names["A"]: [make.numbers(*make.whole, K), make.numbers(*make.whole, 2 * K)],
            names["B"]: [make.numbers(K, n), make.numbers(2 * K, n)],
            "bias": None if sizes.is_last else make.numbers(n),
        }

    yield Call(one, operands(bias=not sizes.is_last), dim, flops, True)
    yield Call(one, operands(bias=False), dim | {"reduce_op": "avg"}, flops, True)
    for config in ("portable", "streamed"):
        named = dim | {"config": config}
        yield Call(one, operands(bias=not sizes.is_last), named, flops, True)
    yield Call(one, of_two(A="A", B="B"), dim, 3 * flops, True)
    part = list(make.whole) if sizes.is_last else list(sizes.leading)
    added = operands(bias=not sizes.is_last) | {"residual": make.numbers(*part, n_local)}
    yield Call(one, added, dim | {"reduce_op": "avg"}, flops, True)
    alone = operands(bias=not sizes.is_last) | {"residual": make.numbers(*part, n_local)}
    yield Call(one, alone, dim | {"reduce_op": "avg", "batch_invariant": True}, flops, True)
    settings = dim | {"reduce_op": "sum"}
    for residual in (None, make.numbers(*part, n_local)):
        both = of_two(A="As", B="Bs") | {"residual": residual}
        yield Call("agmm::_matmul_reduce_scatter", both, settings, 3 * flops, True)
    two = operands(bias=False)
    if sizes.dim == 0 and not sizes.is_last:
        native = "agmm::_fused_matmul_reduce_scatter_native"
        yield Call(native, two, {"reduce_op": "sum"}, flops, True)
    if not sizes.is_last:
        two = operands(bias=False)
        yield Call("symm_mem::fused_matmul_reduce_scatter", two, settings, 0, False)


def _without_a_dimension(make: _Maker) -> Iterator[Call]:
    """Ops that gather and scatter nothing."""
    m = prod(make.sizes.leading)
    shape, flops = (*make.sizes.leading, K), 2 * m * K * N
    for op in ("agmm.matmul_all_reduce", "agmm::_matmul_all_reduce"):
        of_sum = {"A": make.numbers(*shape), "B": make.numbers(K, N), "bias": make.numbers(N)}
        yield Call(op, of_sum, {}, flops, True)
        added = {name: tensor.clone() for name, tensor in of_sum.items()}
        added["residual"] = make.numbers(*shape[:-1], N)
        by_copies = {name: tensor.clone() for name, tensor in added.items()}
        alone = {name: tensor.clone() for name, tensor in added.items()}
        yield Call(op, added, {}, flops, True)
        yield Call(op, by_copies, {"config": "portable"}, flops, True)
        yield Call(op, alone, {"batch_invariant": True}, flops, True)
        streamed = {name: tensor.clone() for name, tensor in added.items()}
        yield Call(op, streamed, {"config": "streamed"}, flops, True)
    yield from _normed_sums(make, flops)
    for result_scale in (False, True):
        scaled_sum: dict[str, Any] = {
            "A": make.fp8(*shape),
            "B": make.weight(),
            "scale_a": make.scales(*make.sizes.leading, 1),
            "scale_b": make.scales(1, N),
            "bias": make.numbers(N).bfloat16(),
            "result_scale": make.scales() if result_scale else None,
        }
        out: _Settings = {"out_dtype": E4M3 if result_scale else torch.bfloat16}
        for op in ("agmm.scaled_matmul_all_reduce", "agmm::_scaled_matmul_all_reduce"):
            given = {k: t if t is None else t.detach().clone() for k, t in scaled_sum.items()}
            yield Call(op, given, out | {"use_fast_accum": False}, flops, False)
            given = {k: t if t is None else t.detach().clone() for k, t in scaled_sum.items()}
            by_copies_too = out | {"use_fast_accum": False, "config": "portable"}
            yield Call(op, given, by_copies_too, flops, False)
    alone = {"A": make.numbers(*shape), "B": make.numbers(K, N), "bias": make.numbers(N)}
    yield Call("agmm::_invariant_matmul", alone, {}, flops, True)
    pivot: _Settings = {"a_chunk_pivot": 0}
    plain = {"a": make.numbers(m, K), "b": make.numbers(K, N), "a_chunk_signals": make.signals()}
    yield Call("agmm::_async_input_mm", plain, pivot, flops, False)
    scaled = {
        "A": make.fp8(m, K),
        "B": make.weight(),
        "scale_a": make.scales(m, 1),
        "scale_b": make.scales(1, N),
    }
    waiting = scaled | {"bias": make.numbers(N).bfloat16(), "a_chunk_signals": make.signals()}
    settings = pivot | {"use_fast_accum": False}
    yield Call("agmm::_async_input_scaled_mm", waiting, settings, flops, False)
    gated: _Settings = {"activation": "silu_mul"}
    two = {name: tensor.clone() for name, tensor in plain.items()} | {"up": make.numbers(K, N)}
    yield Call("agmm::_async_input_mm", two, pivot | gated, 2 * flops, False)
    two = {name: tensor.detach().clone() for name, tensor in waiting.items()}
    two |= {"B": make.weight(), "up": make.weight(), "scale_up": make.scales(1, N)}
    two["bias_up"] = make.numbers(N).bfloat16()
    yield Call("agmm::_async_input_scaled_mm", two, settings | gated, 2 * flops, False)
    settings = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    alone = {name: scaled[name].detach().clone() for name in scaled} | {"B": make.weight()}
    yield Call("agmm::_scaled_matmul", alone, settings, flops, False)


def _normed_sums(make: _Maker, flops: int) -> Iterator[Call]:
    leading = make.sizes.leading

    def operands() -> dict[str, Any]:
        return {
            "A": make.numbers(*leading, K),
            "B": make.numbers(K, N),
            "bias": make.numbers(N),
            "residual": make.numbers(*leading, N),
            "weight": make.numbers(N),
        }

    eps: _Settings = {"eps": 1e-6}
    public = "agmm.matmul_all_reduce_rms_norm"
    for op in (public, "agmm::_matmul_all_reduce_rms_norm"):
        for batch_invariant in (False, True):
            settings = eps | {"batch_invariant": batch_invariant}
            yield Call(op, operands(), settings, flops, True)
    yield Call(public, operands(), eps | {"config": "streamed"}, flops, True)
    yield Call(public, operands(), eps | {"quantize_out": "block"}, flops, False)
    scaled = operands() | {"scale_out": make.scales()}
    yield Call(public, scaled, eps | {"quantize_out": "tensorwise"}, flops, False)


def _collectives(make: _Maker) -> Iterator[Call]:
    sizes, world_size = make.sizes, make.world_size
    shard = (*sizes.leading, sizes.columns)
    whole = list(shard)
    whole[sizes.dim] *= world_size
    kinds: list[tuple[str, tuple[int, ...], list[int], dict[str, Any], list[str]]] = [
        ("all_gather", shard, whole, {"dim": sizes.dim}, []),
        ("reduce_scatter", tuple(whole), list(shard), {"dim": sizes.dim, "op": "sum"}, ["avg"]),
        ("all_reduce", shard, list(shard), {"op": "sum"}, ["avg"]),
    ]
    for kind, given, result, settings, others in kinds:
        public = f"agmm.collectives.{kind}"
        yield Call(public, {"x": make.numbers(*given)}, settings, 0, True)
        yield Call(f"agmm::_{kind}", {"x": make.numbers(*given)}, settings, 0, True)
        for op in others:
            yield Call(public, {"x": make.numbers(*given)}, settings | {"op": op}, 0, True)
        into = {"x": make.numbers(*given), "out": make.numbers(*result)}
        yield Call(public, into, settings, 0, False)
        yield Call(public, {"x": make.numbers(*given)}, settings | {"async_op": True}, 0, False)
    for op in ("agmm.collectives.all_reduce_rms_norm", "agmm::_all_reduce_rms_norm"):
        normed = {
            "x": make.numbers(*shard),
            "residual": make.numbers(*shard),
            "weight": make.numbers(shard[-1]),
        }
        yield Call(op, normed, {"eps": 1e-6}, 0, True)
        if op in PUBLIC:
            into = {name: tensor.clone() for name, tensor in normed.items()}
            into |= {"out": make.numbers(*shard), "residual_out": make.numbers(*shard)}
            yield Call(op, into, {"eps": 1e-6}, 0, False)


EXPERTS = 2
"""The experts of a rank."""


def _of_experts(make: _Maker) -> Iterator[Call]:
    """Ops of mixtures of experts. Every token goes to every expert, so that all ranks have as many
    rows."""
    held, ranks, device = prod(make.sizes.leading), make.world_size, make.device
    total = held * ranks
    rows, flops = EXPERTS * total, 2 * EXPERTS * total * K * N
    ids = torch.arange(EXPERTS * ranks, device=device).repeat(held, 1)
    experts = {"num_experts": EXPERTS * ranks, "capacity": rows}
    local = {"num_local_experts": EXPERTS}
    yield Call("agmm.moe.route", {"topk_ids": ids.clone()}, experts, 0, False)
    yield Call("agmm::_route", {"topk_ids": ids.clone()}, experts | local, 0, False)

    def weights(k: int = K, n: int = N) -> list[torch.Tensor]:
        return [make.numbers(EXPERTS, k, n), make.numbers(EXPERTS, n, k).mT]

    def biases() -> list[torch.Tensor | None]:
        return [make.numbers(EXPERTS, N), None]

    given = {"weights": weights(), "bias": biases(), "topk_ids": ids.int()}
    options: _Settings = {"capacity": rows, "return_gathered": True, "save_gathered": True}
    public = "agmm.all_gather_grouped_matmul"
    yield Call(public, {"x": make.numbers(held, K)} | given, options, 2 * flops, True)
    given = {"weights": weights(), "bias": biases(), "topk_ids": ids.int()}
    options = {"capacity": rows, "activation": "silu_mul"}
    yield Call(public, {"x": make.numbers(held, K)} | given, options, 2 * flops, True)
    given = {"weights": weights(), "bias": biases(), "topk_ids": ids.int()}
    options = {"capacity": rows, "activation": "silu_mul", "quantize": "rowwise"}
    yield Call(public, {"x": make.numbers(held, K)} | given, options, 2 * flops, True)
    # Each rank has a slice of all experts here, and so the same routing.
    routing = _routing(total, EXPERTS, device)
    tensors = {name: getattr(routing, name) for name in ("tokens", "offsets", "positions")}
    given = {"x": make.numbers(held, K), "weights": weights(), "biases": biases()}
    given |= {name: tensor.clone() for name, tensor in tensors.items()}
    settings: _Settings = {"return_gathered": True, "activation": "silu_mul"}
    settings["save_preactivation"] = True
    yield Call("agmm::_all_gather_grouped_matmul", given, settings, 2 * flops, True)
    given = {
        "y": make.numbers(rows, K),
        "weights": make.numbers(EXPERTS, K, N),
        "bias": make.numbers(EXPERTS, N),
        "topk_weights": make.numbers(held, EXPERTS),
    }
    public = "agmm.grouped_matmul_reduce_scatter"
    yield Call(public, given, {"routing": routing}, flops, True)
    again: dict[str, Any] = dict(given)
    again = {name: tensor.clone() for name, tensor in again.items()}
    yield Call(public, again, {"routing": routing, "quantize": "block"}, flops, True)
    given = {
        "ys": [make.numbers(rows, K), make.numbers(rows, K)],
        "weights": weights(),
        "bias": make.numbers(EXPERTS, N),
        "topk_weights": make.numbers(held, EXPERTS).float(),
    }
    given |= {name: tensor.clone() for name, tensor in tensors.items()}
    yield Call("agmm::_grouped_matmul_reduce_scatter", given, {}, 2 * flops, True)
    yield from _of_scaled_experts(make, ids, routing)
    given = {"rows": make.numbers(rows, K), "douts": make.numbers(rows, N)}
    given["offsets"] = routing.offsets.clone()
    yield Call("agmm::_grouped_grad_of_weight", given, {}, flops, False)
    given = {"douts": make.numbers(rows, N), "offsets": routing.offsets.clone()}
    yield Call("agmm::_grouped_grad_of_bias", given, {}, 0, False)


def _of_scaled_experts(
    make: _Maker, ids: torch.Tensor, routing: agmm.moe.Routing
) -> Iterator[Call]:
    """Ops of mixtures of experts in fp8."""
    held, rows = len(ids), len(routing.tokens)
    flops = 2 * rows * K * N
    tensors = {name: getattr(routing, name) for name in ("tokens", "offsets", "positions")}
    how: _Settings = {"out_dtype": torch.bfloat16, "use_fast_accum": False}

    def weight() -> torch.Tensor:
        return make.fp8(EXPERTS, N, K).mT

    def bias() -> torch.Tensor:
        return make.numbers(EXPERTS, N).bfloat16()

    for scale_a, scale_b in (((1,), (1, N)), ((1,), (1, 1))):  # of rows, of blocks

        def of_rows(count: int, name: str, scale: tuple[int, ...] = scale_a) -> dict[str, Any]:
            return {name: make.fp8(count, K), "scale_a": make.scales(count, *scale)}

        def scales(shape: tuple[int, ...] = scale_b) -> torch.Tensor:
            return make.scales(EXPERTS, *shape)

        given = of_rows(held, "x") | {"topk_ids": ids.int(), "bias": [bias(), None]}
        given |= {"weights": [weight(), weight()], "scale_b": [scales(), scales()]}
        options: _Settings = {"capacity": rows, "activation": "silu_mul"}
        yield Call("agmm.all_gather_grouped_matmul", given, options, 2 * flops, False)
        given = of_rows(held, "x") | {"biases": [bias(), None]}
        given |= {"weights": [weight(), weight()], "scale_bs": [scales(), scales()]}
        given |= {name: tensor.clone() for name, tensor in tensors.items()}
        op = "agmm::_all_gather_scaled_grouped_matmul"
        yield Call(op, given, how | {"activation": "silu_mul"}, 2 * flops, False)
        given = of_rows(rows, "y") | {"scale_b": scales(), "bias": bias()}
        given["topk_weights"] = make.scales(held, EXPERTS)
        public = given | {"weights": weight()}
        op = "agmm.grouped_matmul_reduce_scatter"
        yield Call(op, public, {"routing": routing}, flops, False)
        given = {name: tensor.detach().clone() for name, tensor in given.items()}
        given |= {name: tensor.clone() for name, tensor in tensors.items()}
        op = "agmm::_scaled_grouped_matmul_reduce_scatter"
        yield Call(op, given | {"weight": weight()}, how, flops, False)


def _routing(tokens: int, experts: int, device: str = "cpu") -> agmm.moe.Routing:
    """The routing of tokens of which each goes to all experts of a rank, one after the other."""
    every = torch.arange(tokens * experts, dtype=torch.int32, device=device)
    counts = torch.full((experts,), tokens, dtype=torch.int32, device=device)
    offsets = tokens * torch.arange(experts + 1, dtype=torch.int32, device=device)
    positions = every.view(experts, tokens).t().contiguous()
    divisor = max(1, tokens)
    return agmm.moe.Routing(every % divisor, every // divisor, counts, offsets, positions)


def _fp8_gathers(make: _Maker) -> Iterator[Call]:
    shard = make.sizes.leading
    dim: _Settings = {"gather_dim": make.sizes.dim}
    settings: _Settings
    flops = 2 * 2 * make.rows * K * N  # with two weights
    for quantize in ("tensorwise", "rowwise", "block"):
        for reduce_amax in (False, True)[: 2 if quantize == "tensorwise" else 1]:
            plain = {
                "A_shard": make.numbers(*shard, K),
                "B": [make.numbers(K, N), make.numbers(N, K).t()],
                "bias": [make.numbers(N), None],
            }
            settings = dim | {"quantize": quantize, "reduce_amax": reduce_amax}
            yield Call("agmm.all_gather_matmul", plain, settings, flops, False)

    for quantize_out in ("tensorwise", "rowwise", "block"):
        plain = {"A_shard": make.numbers(*shard, K), "B": make.numbers(K, N)}
        settings = dim | {"quantize_out": quantize_out}
        if quantize_out == "tensorwise":
            plain["scale_out"] = make.scales()
        yield Call("agmm.all_gather_matmul", plain, settings, flops // 2, False)

    def operands(names: str, *, is_rowwise: bool = True, result_scale: bool = False) -> Any:
        A_shard, B, scale_a, scale_b, bias, of_result = names.split()
        return {
            A_shard: make.fp8(*shard, K),
            B: [make.weight(), make.weight()],
            scale_a: make.scales(*((*shard, 1) if is_rowwise else (1,))),
            scale_b: [make.scales(*((1, N) if is_rowwise else (1,))) for _ in range(2)],
            bias: [make.numbers(N).bfloat16(), None],
            of_result: [make.scales() if result_scale else None for _ in range(2)],
        }

    public, torchs = "agmm.all_gather_scaled_matmul", "agmm::_all_gather_scaled_matmul"
    names = "A_shard B scale_a scale_b bias result_scale"
    of_op = "A_shard Bs scale_a scale_bs biases result_scales"
    of_torch = "A Bs A_scale B_scales biases result_scales"
    settings = dim | {"return_A": True, "out_dtype": torch.bfloat16, "use_fast_accum": False}
    for is_rowwise in (True, False):
        given = operands(names, is_rowwise=is_rowwise)
        yield Call(public, given, settings, flops, False)
        yield Call(torchs, operands(of_op, is_rowwise=is_rowwise), settings, flops, False)
    for quantize_out in ("tensorwise", "block"):
        given = operands(names)
        if quantize_out == "tensorwise":
            given["scale_out"] = make.scales()
        yield Call(public, given, dim | {"quantize_out": quantize_out}, flops, False)
    gated: _Settings = {"activation": "gelu_tanh_mul"}
    yield Call(public, operands(names), settings | gated, flops, False)
    settings = settings | {"out_dtype": E4M3}
    yield Call(public, operands(names, result_scale=True), settings, flops, False)
    given = operands(names, result_scale=True)
    given["result_scale"][1] = None
    yield Call(public, given, settings | gated, flops, False)
    yield Call(torchs, operands(of_op, result_scale=True), settings, flops, False)
    served = "symm_mem::fused_all_gather_scaled_matmul"
    settings = dim | {"out_dtypes": [torch.bfloat16, None], "use_fast_accum": [False] * 2}
    yield Call(served, operands(of_torch, result_scale=True), settings, 0, False)


def _fp8_scatters(make: _Maker) -> Iterator[Call]:
    sizes = make.sizes
    n = sizes.columns * make.world_size if sizes.is_last else N
    flops = 2 * make.rows * K * n

    def operands(names: str, *, result_scale: bool = False, count: int = 0) -> dict[str, Any]:
        """Make the operands of one product, or of several in lists."""
        of_each = [
            (
                make.fp8(*make.whole, K),
                make.weight(K, n),
                make.scales(*make.whole, 1),
                make.scales(1, n),
            )
            for _ in range(count or 1)
        ]
        lists: list[Any] = list(map(list, zip(*of_each, strict=True)))
        return {
            **dict(zip(names.split(), lists if count else of_each[0], strict=True)),
            "bias": None if sizes.is_last else make.numbers(n).bfloat16(),
            "result_scale": make.scales() if result_scale else None,
        }

    common: _Settings = {"reduce_op": "sum", "use_fast_accum": False}
    for result_scale in (False, True):
        dtype = {"out_dtype": E4M3 if result_scale else torch.bfloat16}
        settings = common | dtype | {"scatter_dim": sizes.dim}
        public, names = "agmm.scaled_matmul_reduce_scatter", "A B scale_a scale_b"
        given = operands(names, result_scale=result_scale)
        yield Call(public, given, settings, flops, False)
        given = operands(names, result_scale=result_scale, count=2)
        yield Call(public, given, settings, 2 * flops, False)
        given = operands("As Bs scale_as scale_bs", result_scale=result_scale, count=2)
        torchs = "agmm::_scaled_matmul_reduce_scatter"
        yield Call(torchs, given, settings, 2 * flops, False)
        if not sizes.is_last:
            dims = ("orig_scatter_dim", "scatter_dim_after_maybe_reshape")
            settings = common | dtype | dict.fromkeys(dims, sizes.dim)
            settings |= {"output_shape": [*make.whole, n]}
            given = operands("A B A_scale B_scale", result_scale=result_scale)
            served = "symm_mem::fused_scaled_matmul_reduce_scatter"
            yield Call(served, given, settings, 0, False)


def _packed(make: _Maker) -> Iterator[Call]:
    sizes, flops = make.sizes, 2 * make.rows * K * N
    weights = [packed_work.weight(N, K, K, seed, bias=False)[0] for seed in range(2)]
    shard = make.numbers(*sizes.leading, K)
    biases = [make.numbers(N), None]
    settings: _Settings = {"gather_dim": sizes.dim, "return_A": True}
    public = {"A_shard": shard, "B": weights, "bias": biases}
    yield Call("agmm.all_gather_matmul", public, settings, 2 * flops, False)
    operands = {
        "A_shard": shard.clone(),
        "packed": [weight.packed.clone() for weight in weights],
        "biases": [make.numbers(N), None],
    }
    settings = settings | {"ns": [N, N], "group_sizes": [K, K], "strict": False}
    yield Call("agmm::_all_gather_packed_matmul", operands, settings, 2 * flops, False)
