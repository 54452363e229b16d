"""What the tests of `agmm.collectives.all_reduce_rms_norm` run inside the ranks of a pool, on CPUs
and GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist

import agmm

EPS = 1e-5
SHAPES = ((1,), (7,), (0, 8), (3, 5), (2, 3, 64), (130, 96), (40, 6151))


def _all(
    world_size: int, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """What the ranks sum, the residual and the weight."""
    generator = torch.Generator(device).manual_seed(seed)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    return [numbers(*shape) for _ in range(world_size)], numbers(*shape), numbers(shape[-1])


def wrong(
    group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> list[str]:
    """Faults, in words: new results and given ones, in place."""
    rank, found = dist.get_rank(group), []
    every, residual, weight = _all(group.size(), shape, dtype, device, sum(shape))
    total = every[0].float()
    for x in every[1:]:
        total = total + x.float()
    new = (total.to(dtype).float() + residual.float()).to(dtype)
    exact = new.double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    # Torch may round twice.
    bound = exact.abs() * max(2 * torch.finfo(dtype).eps, 2e-6) + 1e-6
    x = every[rank]
    call = agmm.collectives.all_reduce_rms_norm
    results = [call(x, residual, weight, EPS, group)]
    given = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    results.append(call(x, residual, weight, EPS, group, out=given[0], residual_out=given[1]))
    if any(a is not b for a, b in zip(given, results[-1], strict=True)):
        found.append(f"rank {rank}: {shape} not the tensors given")
    own, kept = x.clone(), residual.clone()
    results.append(call(own, kept, weight, EPS, group, out=own, residual_out=kept))
    own, kept = x.clone(), residual.clone()
    results.append(call(own, kept, weight, EPS, group, out=kept))
    spread = torch.stack([x, x], -1)[..., 0]
    results.append(call(spread, residual, weight, EPS, group, residual_out=spread))
    for i, (normed, summed) in enumerate(results):
        if not torch.equal(summed, new):
            found.append(f"rank {rank}: {shape} {dtype}, result {i}: residual")
        if not bool(((normed.double() - exact).abs() <= bound).all()):
            found.append(f"rank {rank}: {shape} {dtype}, result {i}: norm")
        if not torch.equal(normed, results[0][0]):
            found.append(f"rank {rank}: {shape} {dtype}, result {i}: other bits")
    return found


def gradients(group: dist.ProcessGroup) -> list[str]:
    """Faults where the gradients are not those of the parts."""
    every, residual, weight = _all(group.size(), (4, 6), torch.float64, "cpu", 3)
    found = []

    def leaves() -> list[torch.Tensor]:
        own = every[dist.get_rank(group)], residual, weight
        return [tensor.clone().requires_grad_() for tensor in own]

    fused, parts = leaves(), leaves()
    normed, total = agmm.collectives.all_reduce_rms_norm(fused[0], fused[1], fused[2], EPS, group)
    (normed.sin().sum() + total.cos().sum()).backward()
    summed = agmm.collectives.all_reduce(parts[0], group) + parts[1]
    other = torch.nn.functional.rms_norm(summed, (6,), parts[2], EPS)
    (other.sin().sum() + summed.cos().sum()).backward()
    for a, b in zip(fused, parts, strict=True):
        if a.grad is None or b.grad is None or not torch.equal(a.grad, b.grad):
            found.append(f"{a.grad} for {b.grad}")
    return found


def compiled(group: dist.ProcessGroup) -> list[str]:
    """One op in the graph, and the eager values."""
    every, residual, weight = _all(group.size(), (4, 6), torch.float32, "cpu", 4)
    x, graphs = every[dist.get_rank(group)], []

    def layer(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return agmm.collectives.all_reduce_rms_norm(x, residual, weight, EPS, group)

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    with torch.no_grad():
        found = torch.compile(layer, backend=backend, fullgraph=True)(x, residual, weight)
        eager = layer(x, residual, weight)
    faults = [] if all(map(torch.equal, found, eager)) else ["other values"]
    targets = [target for target in graphs[0] if "agmm" in target]
    return faults if targets == ["agmm._all_reduce_rms_norm.default"] else [*faults, str(graphs)]
