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
    found = [
        (name, one, getattr(import_module(name), one)) for name in MODULES for one in _all(name)
    ]
    return [
        pytest.param(function, id=f"{module}.{name}")
        for module, name, function in found
        if inspect.isfunction(function)
    ]


def _all(module: str) -> list[str]:
    return list(import_module(module).__all__)


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
