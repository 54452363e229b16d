"""What `help` says of the public functions names each of their arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

MODULES = (
    "agmm",
    "agmm.async_tp",
    "agmm.collectives",
    "agmm.moe",
    "agmm.nn",
    *(f"agmm.integrations.{name}" for name in ("fsdp", "megatron", "peft", "sglang", "vllm")),
    "agmm.integrations.transformers",
)


def _functions() -> list[Any]:
    modules = [import_module(name) for name in MODULES]
    return [
        pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")
        for module in modules
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    ]


def unnamed(function: Callable[..., Any]) -> list[str]:
    """The arguments that the docstring does not name."""
    said = set(re.findall(r"\w+", function.__doc__ or ""))
    return [name for name in inspect.signature(function).parameters if name not in said]


@pytest.mark.parametrize("function", _functions())
def test_every_argument_is_named(function: Callable[..., Any]) -> None:
    assert unnamed(function) == []


def test_an_argument_that_is_left_out_is_found() -> None:
    def of_two(given: int, forgotten: int) -> None:
        """Takes what is given."""

    assert unnamed(of_two) == ["forgotten"]
