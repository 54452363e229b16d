"""Configurations for torchtitan's trainer, which imports this module by its name: torchtitan's
debug model with two layers, and what it lacks in a test: data and weights that are the same on any
number of ranks, and losses that are written in full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import (
    llama3_debugmodel,
    llama3_debugmodel_dist_gemm,
)

_LAYERS, _LENGTH, _BATCH, _STEPS = 2, 16, 2, 4


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """One batch, again and again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Has no options of its own."""

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = local_batch_size, seq_len + 1
        self._tokens = torch.randint(256, shape, generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        inputs, labels = self._tokens[:, :-1].contiguous(), self._tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1]).expand(inputs.shape).contiguous()
        while True:
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Nothing here is text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Has no options of its own."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Written(MetricsProcessor):  # type: ignore[misc]
    """A line for each step in a file of the rank: the loss and the norm of all gradients."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """Has no options of its own."""

    def __init__(self, config: Config, *, dump_folder: str, **options: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **options)
        self._file = Path(dump_folder) / f"steps.{dist.get_rank()}"

    def log(self, step: int, loss: float, _: float, norm: float, **__: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps([loss, norm]) + "\n")


def _draw(shape: tuple[int, ...], seed: int, weight: torch.Tensor) -> None:
    """Fills this rank's part of a weight that has such a shape on all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    whole += len(shape) == 1  # weights of norms
    here = weight.to_local() if isinstance(weight, DTensor) else weight
    for dim, (size, own) in enumerate(zip(shape, here.shape, strict=True)):
        if size != own:
            whole = whole.chunk(size // own, dim)[dist.get_rank()]
    here.copy_(whole)


def _shape(config: Any) -> tuple[int, ...]:
    if isinstance(config, Linear.Config):
        return config.out_features, config.in_features
    if isinstance(config, Embedding.Config):
        return config.num_embeddings, config.embedding_dim
    return (config.normalized_shape,)


def eager() -> Any:
    """What `--config eager` stands for: linears that call torch's fused ops."""
    return _small(llama3_debugmodel_dist_gemm())


def compiled() -> Any:
    """What `--config compiled` stands for: layers in which torch's compiler puts the fused ops."""
    config = _small(llama3_debugmodel())
    config.compile = CompileConfig(
        enable=True, enable_async_tensor_parallel=True, components=["model"]
    )
    return config


def _small(config: Any) -> Any:
    model = config.model_spec.model
    model.layers = model.layers[:_LAYERS]
    for layer in model.layers:  # torch has no backward of FlexAttention on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    weights = (Linear.Config, Embedding.Config, RMSNorm.Config)
    for seed, (_, part, _, _) in enumerate(model.traverse(weights)):
        part.param_init = {"weight": partial(_draw, _shape(part), seed)}
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Tokens.Config()
    config.metrics = Written.Config(log_freq=1)
    config.optimizer = default_adamw(lr=1e-2)
    config.optimizer.implementation = "for-loop"
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = _BATCH, _LENGTH, _STEPS
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.checkpoint.enable = False
    return config
