"""What the tests of loading run inside the ranks: state dicts that fit a layer, and that do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_groups import mesh_over
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from agmm.nn import (
    ColumnParallelLinear,
    GatherColwiseParallel,
    RowParallelLinear,
    RowwiseScatterParallel,
    full_state_dict,
    load_full_state_dict,
)
from agmm.testing.reference import relative_error

K, N = 16, 32
SIZES = {"column": (K, N), "outputs": (K, N), "row": (N, K)}
"""The features of the whole layers, in and out."""
_Whole = torch.nn.Linear


def _layer(kind: str, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    options |= {"device_mesh": mesh, "dtype": torch.float64}
    if kind == "row":
        return RowParallelLinear(*SIZES[kind], **options)
    k, n = SIZES[kind]
    return ColumnParallelLinear(k, [n // 4, 3 * n // 4] if kind == "outputs" else n, **options)


def _whole(kind: str, seed: int = 5) -> _Whole:
    """A whole layer, which is the same on all ranks."""
    torch.manual_seed(seed)
    return _Whole(*SIZES[kind], dtype=torch.float64)


def _of_width(kind: str, factor: float) -> _Whole:
    """A layer whose dimension that the ranks share is another one."""
    torch.manual_seed(5)
    k, n = SIZES[kind]
    k, n = (int(k * factor), n) if kind == "row" else (k, int(n * factor))
    return _Whole(k, n, dtype=torch.float64)


def _parts(kind: str, whole: _Whole) -> dict[str, torch.Tensor]:
    """This rank's part of a whole layer, one below another for several outputs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = {name: value.detach() for name, value in whole.named_parameters()}
    if kind == "row":
        return {"weight": state["weight"].chunk(ranks, 1)[rank].clone(), "bias": state["bias"]}
    sizes = [N // 4, 3 * N // 4] if kind == "outputs" else [N]
    return {
        name: torch.cat([one.chunk(ranks)[rank] for one in value.split(sizes)])
        for name, value in state.items()
    }


def _by_output(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """A state under the names of the layer's parameters."""
    if kind != "outputs":
        return state
    found = {}
    for name, value in state.items():
        rows = len(value) // 4
        found[f"{name}_0"], found[f"{name}_1"] = value[:rows].clone(), value[rows:].clone()
    return found


def _over(mesh: DeviceMesh, *placements: Any) -> Callable[[torch.Tensor], DTensor]:
    return lambda value: distribute_tensor(value, mesh, placements, src_data_rank=None)


def _mesh(*ranks: int) -> DeviceMesh:
    return mesh_over(ranks or tuple(range(dist.get_world_size())))


def _metadata_of(state: Any, like: Any) -> Any:
    found = copy.copy(like)  # of whose class and metadata it is
    found.clear()
    found.update(state)
    return found


# Each makes of a whole layer what is loaded.
FITTING: dict[str, Callable[[str, _Whole], Any]] = {
    "whole": lambda kind, whole: whole.state_dict(),
    "whole, plain dict": lambda kind, whole: dict(whole.state_dict()),
    "whole by output": lambda kind, whole: _by_output(kind, dict(whole.state_dict())),
    "whole in float32": lambda kind, whole: copy.deepcopy(whole).float().state_dict(),
    "parts": _parts,
    "parts by output": lambda kind, whole: _by_output(kind, _parts(kind, whole)),
    "replicated": lambda kind, whole: {
        n: _over(_mesh(), Replicate())(v)
        for n, v in _by_output(kind, dict(whole.state_dict())).items()
    },
    "replicated, one for all outputs": lambda kind, whole: {
        n: _over(_mesh(), Replicate())(v) for n, v in whole.state_dict().items()
    },
    "over another mesh": lambda kind, whole: {
        n: _over(mesh_over(((0, 1), (2, 3))), Replicate(), Shard(0))(v)
        for n, v in _by_output(kind, dict(whole.state_dict())).items()
    },
    "of another layer": lambda kind, whole: _filled(kind, whole).state_dict(),
    "of a layer over a mesh": lambda kind, whole: _filled(
        kind, whole, mesh_over((0, 1, 2, 3), ("tp",))
    ).state_dict(),
}
OTHERS: dict[str, Callable[[str, _Whole], Any]] = {
    "narrower": lambda kind, whole: _of_width(kind, 1 / 4).state_dict(),
    "narrower, plain dict": lambda kind, whole: dict(_of_width(kind, 1 / 4).state_dict()),
    "narrower by output": lambda kind, whole: _by_output(
        kind, dict(_of_width(kind, 1 / 4).state_dict())
    ),
    "narrower, weight only": lambda kind, whole: {
        **whole.state_dict(),
        "weight": _of_width(kind, 1 / 4).weight.detach(),
    },
    "half as wide": lambda kind, whole: _of_width(kind, 1 / 2).state_dict(),
    "twice as wide": lambda kind, whole: _of_width(kind, 2).state_dict(),
    "four times as wide, plain dict": lambda kind, whole: dict(_of_width(kind, 4).state_dict()),
    "longer rows": lambda kind, whole: {
        n: torch.cat([v, v], -1) if n == "weight" else v for n, v in whole.state_dict().items()
    },
    "longer rows of a part": lambda kind, whole: {
        n: torch.cat([v, v], int(kind != "row")) if n == "weight" else v
        for n, v in _parts(kind, whole).items()
    },
    "a number": lambda kind, whole: {**whole.state_dict(), "weight": torch.tensor(1.0)},
    "parts as of a module": lambda kind, whole: _metadata_of(
        _parts(kind, whole), whole.state_dict()
    ),
    "replicated and narrower": lambda kind, whole: {
        n: _over(_mesh(), Replicate())(v) for n, v in _of_width(kind, 1 / 4).state_dict().items()
    },
}


def _filled(kind: str, whole: _Whole, mesh: DeviceMesh | None = None) -> Any:
    layer = _layer(kind, mesh)
    load_full_state_dict(layer, whole.state_dict())
    return layer


def _loads(kind: str, state: Any, **options: Any) -> Any:
    layer = _layer(kind)
    layer.load_state_dict(state, **options)
    return layer


def _differences(layer: Any, whole: _Whole, limit: float = 1e-12) -> list[str]:
    found = full_state_dict(layer)
    return [
        f"{name}: error {relative_error(found[name], value)}"
        for name, value in whole.state_dict().items()
        if found[name].shape != value.shape or relative_error(found[name], value) > limit
    ]


def fitting(kind: str) -> list[str]:
    """Faults of layers that were loaded from state dicts which fit."""
    faults = []
    whole = _whole(kind)
    for name, make in FITTING.items():
        for options in ({}, {"assign": True}, {"strict": False}):
            limit = 1e-6 if "float32" in name else 1e-12
            try:
                found = _differences(_loads(kind, make(kind, whole), **options), whole, limit)
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            faults += [f"{name}, {options}: {fault}" for fault in found]
    return faults


def others(kind: str) -> list[str]:
    """State dicts that a layer took though it fits none of them, or changed it."""
    faults = []
    whole = _whole(kind)
    for name, make in OTHERS.items():
        for options in ({}, {"assign": True}, {"strict": False}):
            layer = _filled(kind, _whole(kind, 6))
            try:
                layer.load_state_dict(make(kind, whole), **options)
                faults.append(f"{name}, {options}: loaded")
            except RuntimeError as error:
                if "Error(s) in loading state_dict" not in str(error) or "weight" not in str(error):
                    faults.append(f"{name}, {options}: {error}")
            shape = _of_width(kind, 1).weight.shape
            if full_state_dict(layer)["weight"].shape != shape:
                faults.append(f"{name}, {options}: another shape")
    return faults


def message(kind: str, state: str) -> str:
    """What a load says."""
    try:
        _loads(kind, OTHERS[state](kind, _whole(kind)))
    except RuntimeError as error:
        return str(error)
    return "loaded"


# --- meshes whose ranks do not ascend ---

MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "reversed": lambda: _mesh(3, 2, 1, 0),
    "rotated": lambda: _mesh(1, 2, 3, 0),
    "part of two dimensions": lambda: mesh_over(((1, 0), (3, 2)), ("dp", "tp"))["tp"],
    "other rows first": lambda: mesh_over(((2, 3), (0, 1)), ("dp", "tp"))["dp"],
}


def _made(kind: str, mesh: DeviceMesh) -> torch.nn.Module:
    """A layer over the mesh, or torch.nn.Linear under a style, sharded before it is loaded."""
    if not kind.endswith("style"):
        made: torch.nn.Module = _layer(kind, mesh)
        return made
    style: Any = {
        "gather style": GatherColwiseParallel(sequence_dim=0),
        "scatter style": RowwiseScatterParallel(sequence_dim=0),
        "torch's column style": ColwiseParallel(input_layouts=Shard(0)),
        "torch's row style": RowwiseParallel(output_layouts=Shard(0)),
    }[kind]
    torch.manual_seed(1)
    k, n = SIZES["row" if kind in ("scatter style", "torch's row style") else "column"]
    found: torch.nn.Module = parallelize_module(_Whole(k, n, dtype=torch.float64), mesh, style)
    return found


def over_mesh(kind: str, name: str, folder: str) -> list[str]:
    """Faults of what goes into layers over a mesh and comes out of them, and of their products."""
    mesh = MESHES[name]()
    size = "row" if kind in ("row", "scatter style", "torch's row style") else "column"
    whole = _whole(size)
    layer = _made(kind, mesh)
    load_full_state_dict(layer, whole.state_dict())
    faults = _differences(layer, whole)
    if kind.startswith("torch's"):
        return faults
    faults += [f"product: {error}" for error in _wrong_product(layer, whole, mesh, kind)]
    options = StateDictOptions(full_state_dict=True)
    found: Any = get_model_state_dict(layer, options=options)
    for one in ("weight", "bias"):
        names = [n for n in found if n.startswith(one)]
        value = torch.cat([found[n] for n in names])
        if not torch.equal(value, whole.state_dict()[one]):
            faults.append(f"torch's whole: {one}")
    dcp.save({"model": layer.state_dict()}, checkpoint_id=folder)
    straight = _made(kind, _mesh())
    state = {"model": straight.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    straight.load_state_dict(state["model"])
    faults += [f"by files: {fault}" for fault in _differences(straight, whole)]
    other = _made(kind, mesh)
    other.load_state_dict(layer.state_dict())
    faults += [f"by a state dict: {fault}" for fault in _differences(other, whole)]
    return faults


def _wrong_product(layer: Any, whole: _Whole, mesh: DeviceMesh, kind: str) -> list[float]:
    """The errors of the outputs: gathered, by the ranks in the group."""
    group = mesh.get_group()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * ranks, whole.in_features, generator=generator, dtype=torch.float64)
    is_row = kind in ("row", "scatter style")
    out = layer(x.chunk(ranks, -1 if is_row else 0)[rank].contiguous())
    wanted = whole(x).detach()
    if is_row:
        pairs = [(out, wanted.chunk(ranks)[rank])]
    else:
        sizes = [N // 4, 3 * N // 4] if kind == "outputs" else [N]
        outs = out if isinstance(out, tuple) else (out,)
        pairs = [
            (o, w.chunk(ranks, -1)[rank])
            for o, w in zip(outs, wanted.split(sizes, -1), strict=True)
        ]
    errors = [relative_error(found.detach(), one) for found, one in pairs]
    return [error for error in errors if error > 1e-12]
