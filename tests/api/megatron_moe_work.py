"""What the tests of Megatron-core's mixtures of experts over agmm run in the ranks of a pool."""

from __future__ import annotations

import contextlib
import copy
import warnings
from functools import cache, partial
from typing import Any
from unittest import mock

import megatron_work
import torch
import torch.distributed as dist

import agmm.integrations.megatron as by_agmm
from agmm.errors import InvalidArgument, Unsupported, forget_warnings
from agmm.testing.reference import relative_error

_EXPERTS, _CHOICES, _HIDDEN, _INNER, _LENGTH, _BATCH = 4, 2, 16, 24, 8, 2


@cache
def _alone() -> Any:
    """A group of this rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def _layer(shared: bool, sliced: bool, grouped: bool, **options: Any) -> Any:
    """Megatron's layer, whose experts the ranks share, or which each of them has whole."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    alone, world = _alone(), dist.group.WORLD
    groups = ProcessGroupCollection()
    groups.tp = groups.tp_ep = groups.tp_cp = groups.tp_dp_cp = world if shared else alone
    groups.cp = groups.expt_dp = alone
    groups.ep = world if shared and not sliced else alone
    groups.expt_tp = world if shared and sliced else alone
    config = TransformerConfig(
        num_layers=1,
        hidden_size=_HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        num_moe_experts=_EXPERTS,
        moe_router_topk=_CHOICES,
        moe_ffn_hidden_size=_INNER,
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=groups.tp.size(),
        expert_model_parallel_size=groups.ep.size(),
        expert_tensor_parallel_size=groups.expt_tp.size(),
        sequence_parallel=shared,
        **{
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            **options,
        },
    )
    with contextlib.ExitStack() as stack:
        if grouped:  # by a package that wants a GPU
            name = "megatron.core.transformer.moe.grouped_gemm_util"
            stack.enter_context(mock.patch(f"{name}.assert_grouped_gemm_is_available"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        spec = get_gpt_layer_local_spec(_EXPERTS, moe_grouped_gemm=grouped)
        mlp = spec.submodules.mlp
        build = partial(build_module, mlp) if isinstance(mlp, ModuleSpec) else mlp
        return build(config=config, layer_number=1, pg_collection=groups)


def _own(whole: Any, sliced: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each of this rank's experts, the first and the second matrix of the whole layer's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    matrices = [
        (one.linear_fc1.weight, one.linear_fc2.weight) for one in whole.experts.local_experts
    ]
    if not sliced:
        return matrices[rank * len(matrices) // size : (rank + 1) * len(matrices) // size]
    found = []
    for first, second in matrices:
        parts = [half.chunk(size)[rank] for half in first.chunk(2)]
        found.append((torch.cat(parts), second.chunk(size, 1)[rank]))
    return found


def _like(experts: Any, ones: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Matrices of experts as the parameters of this class of experts hold them."""
    if hasattr(experts, "weight1"):
        firsts, seconds = (torch.stack(found).transpose(1, 2) for found in zip(*ones, strict=True))
        return [firsts.reshape(experts.weight1.shape), seconds.reshape(experts.weight2.shape)]
    return [matrix for one in ones for matrix in one]


def against_the_whole(grouped: bool, sliced: bool, hooked: bool) -> list[str]:
    """Faults of a layer by agmm against the whole one of Megatron."""
    with megatron_work.on_cpu():
        whole, served = _layer(False, False, False), _layer(True, sliced, grouped)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            held = list(served.experts.parameters())
            for parameter, values in zip(
                held, _like(served.experts, _own(whole, sliced)), strict=True
            ):
                parameter.copy_(values)
            served.router.weight.copy_(whole.router.weight)
        by_agmm.serve_experts(served, strict=not hooked)
        by_agmm.serve_experts(served, strict=not hooked)  # which does nothing more
        if hooked:
            served.experts.local_experts[0].linear_fc1.register_forward_pre_hook(lambda *_: None)
        shape = _LENGTH, _BATCH, _HIDDEN
        x, dout = (torch.randn(shape, generator=generator) for _ in range(2))
        rank, size = dist.get_rank(), dist.get_world_size()
        part: Any
        all_of_it: Any
        part, all_of_it = (one.clone().requires_grad_() for one in (x.chunk(size)[rank], x))
        wanted, _ = whole(all_of_it)
        wanted.backward(dout)
        forget_warnings()
        with contextlib.ExitStack() as stack:
            said = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            calls = megatron_work.counted(stack)
            found, _ = served(part)
            found.backward(dout.chunk(size)[rank])
        dist.all_reduce(served.router.weight.grad)
        pairs = {
            "output": (found, wanted.chunk(size)[rank]),
            "gradient of x": (part.grad, all_of_it.grad.chunk(size)[rank]),
            "gradient of the router": (served.router.weight.grad, whole.router.weight.grad),
        }
        for one in whole.experts.local_experts:
            for linear in (one.linear_fc1, one.linear_fc2):
                linear.weight = torch.nn.Parameter(linear.weight.grad, requires_grad=False)
        gradients = _like(served.experts, _own(whole, sliced))
        for number, (parameter, values) in enumerate(zip(held, gradients, strict=True)):
            pairs[f"gradient of weight {number}"] = parameter.grad, values
        faults = [str(one.message) for one in said if "agmm" in str(one.message)]
        if not any("grouped" in name for name in calls) and not hooked:
            faults.append(f"calls: {calls}")
        for name, (one, two) in pairs.items():
            if relative_error(one, two) > megatron_work.LIMIT:
                faults.append(f"{name}: error {relative_error(one, two)}")
        return faults


def left_to_megatron(options: dict[str, Any], strict: bool) -> list[str]:
    """The messages of a layer that agmm does not serve."""
    forget_warnings()
    stream = mock.patch.object(torch.cuda, "Stream")  # of the all-to-all dispatcher
    with megatron_work.on_cpu(), stream:
        layer = _layer(True, False, False, **copy.deepcopy(options))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                by_agmm.serve_experts(layer, strict=strict)
            except Unsupported as error:
                return [str(error)]
        return [str(one.message) for one in said]


def refused() -> str:
    """The message of a model without mixtures of experts."""
    try:
        by_agmm.serve_experts(torch.nn.Linear(2, 2))
    except InvalidArgument as error:
        return str(error)
    return ""
