"""What the tests of Megatron-core over agmm run inside the ranks of a pool."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import agmm.integrations.megatron as by_agmm
from agmm.errors import InvalidArgument, Unsupported, forget_warnings
from agmm.testing.reference import relative_error

LIMIT = 2e-5
_HIDDEN, _TOKENS, _LENGTH, _BATCH = 32, 64, 16, 2


def _accumulate(x: torch.Tensor, dout: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(dout.t() @ x)


def _norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
    return torch.nn.LayerNorm(hidden_size, eps)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron without what the CPU lacks: a current GPU, its random states, of apex a kernel
    and norms for sequence parallelism, and a name that Megatron has with Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    kernels = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate
    )
    tracker = random.CudaRNGStatesTracker
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for target, name, value in (
            (torch.cuda, "current_device", lambda: "cpu"),
            (WrappedTorchNorm, "__new__", _norm),
            (tracker, "fork", lambda *_: contextlib.nullcontext()),
            (layers, "fused_weight_gradient_mlp_cuda", kernels),
            (layers, "_grad_accum_fusion_available", True),
            (moe_utils, "te_general_gemm", None),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        yield


def _config(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=_HIDDEN,
        num_attention_heads=8,
        num_query_groups=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=dist.get_world_size(),
        masked_softmax_fusion=False,
        **options,
    )


def _spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec()


def _model(config: Any, spec: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(7)
    return GPTModel(config, spec, _TOKENS, _LENGTH, position_embedding_type="rope")


def _prepare(model: Any, fused: bool, hooked: bool) -> None:
    """Fills what begins as zeros, and gives parameters what Megatron's optimizer gives them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if fused:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        if hooked:
            parameter.grad_added_to_main_grad = False


def _losses(model: Any, steps: int) -> list[torch.Tensor]:
    """The losses of each token; the gradients of all steps are summed."""
    generator = torch.Generator().manual_seed(1)
    found = []
    mask = torch.ones(1, 1, _LENGTH, _LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(_LENGTH).expand(_BATCH, -1)
    for _ in range(steps):
        tokens = torch.randint(0, _TOKENS, (_BATCH, _LENGTH), generator=generator)
        losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
        losses.mean().backward()
        found.append(losses.detach())
    return found


def counted(stack: contextlib.ExitStack) -> dict[str, int]:
    """How often agmm's ops run while the stack is open."""
    calls: dict[str, int] = {}
    agmm_ops = torch.ops.agmm
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func.namespace == agmm_ops.name:
                calls[func._opname] = calls.get(func._opname, 0) + 1
            return func(*args, **(kwargs or {}))

    stack.enter_context(Counting())
    return calls


def gpt(sequence: bool, fused: bool, hooked: bool, bias: bool, by_provider: bool) -> list[str]:
    """Faults of a GPT model by agmm against Megatron's."""
    with on_cpu():
        options = {
            "sequence_parallel": sequence,
            "gradient_accumulation_fusion": fused,
            "add_bias_linear": bias,
        }
        spec = _spec()
        provider = by_agmm.spec_provider(strict=True)
        served = _provided(spec, provider) if by_provider else by_agmm.served(spec, strict=True)
        own, other = _model(_config(**options), spec), _model(_config(**options), served)
        other.load_state_dict(own.state_dict())
        for model in (own, other):
            _prepare(model, fused, hooked)
        wanted = _losses(own, 2)
        with contextlib.ExitStack() as stack:
            calls = counted(stack)
            found = _losses(other, 2)
        faults = _miscounted(calls, sequence)
        pairs = {f"losses {i}": pair for i, pair in enumerate(zip(found, wanted, strict=True))}
        for (name, one), two in zip(other.named_parameters(), own.parameters(), strict=True):
            is_linear = "linear_" in name or "output_layer" in name
            if is_linear and name.endswith("weight") and fused:
                pairs[f"main_grad of {name}"] = one.main_grad, two.main_grad
                if hooked and not (one.grad_added_to_main_grad and one.grad is not None):
                    faults.append(f"{name}: hooks would not know")
                if not hooked and one.grad is not None:
                    faults.append(f"{name}: a gradient beside main_grad")
            elif one.grad is not None and two.grad is not None:
                pairs[f"gradient of {name}"] = one.grad, two.grad
            else:
                faults.append(f"{name}: no gradient")
        if not any("linear_qkv" in name for name in pairs):
            faults.append(f"only {list(pairs)}")
        for name, (one, two) in pairs.items():
            error = relative_error(one, two)
            if error > LIMIT:
                faults.append(f"{name}: error {error}")
        return faults


def _provided(spec: Any, provider: Any) -> Any:
    """The spec with what a provider names."""
    import copy

    made = copy.deepcopy(spec)
    attention = made.submodules.self_attention.submodules
    attention.linear_qkv = provider.column_parallel_linear()
    attention.linear_proj = provider.row_parallel_linear()
    return made


def _miscounted(calls: dict[str, int], sequence: bool) -> list[str]:
    wanted = (
        {"_all_gather_matmul", "_matmul_reduce_scatter"} if sequence else {"_matmul_all_reduce"}
    )
    return [] if wanted <= calls.keys() else [f"calls: {calls}"]


def left_to_megatron(kind: str, strict: bool) -> list[str]:
    """The messages of a linear that agmm does not serve, after faults of what it gives."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    forget_warnings()
    with on_cpu():
        config = _config(
            sequence_parallel=kind != "disable_grad_reduce",
            gradient_accumulation_fusion=kind == "deferred",
        )
        provider = by_agmm.spec_provider(strict=strict)
        given: dict[str, Any] = {"config": config, "init_method": torch.nn.init.ones_}
        if kind == "expert":
            given |= {"is_expert": True, "skip_bias_add": True, "bias": False}
        if kind == "disable_grad_reduce":
            given["disable_grad_reduce"] = True
        if kind == "deferred":
            config.defer_embedding_wgrad_compute = True
            given |= {"embedding_activation_buffer": [], "grad_output_buffer": []}
        rows = dist.get_world_size() * 2 if kind == "expert" else 2
        x = torch.randn(rows, 1, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        found = []
        for linear in (ColumnParallelLinear, provider.column_parallel_linear()):
            module = linear(8, 16, **given)
            module.weight.requires_grad_(kind != "frozen")
            module.weight.main_grad = torch.zeros_like(module.weight)
            one = x.clone().requires_grad_()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                try:
                    out, _ = module(one)
                except Unsupported as error:
                    return [str(error)]
            out.sum().backward()
            found.append((out.detach(), one.grad))
        faults = ["other values"] * (
            not all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        )
        return faults + [str(w.message) for w in seen if "agmm" in str(w.message)]


def refused() -> str:
    """The message of a spec without Megatron's linears."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    with on_cpu():
        try:
            by_agmm.served(ModuleSpec(module=IdentityOp))
        except InvalidArgument as error:
            return str(error)
    return ""
