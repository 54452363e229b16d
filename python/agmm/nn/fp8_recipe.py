"""Which operands of a linear layer's three products are quantised to fp8, and how: torchao's
recipes, by their names or from torchao's own config."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from agmm.errors import InvalidArgument
from agmm.runtime.scaled import FP8
from agmm.runtime.scaling import ALL, BLOCK, Tile

_E4M3, _E5M2 = FP8


class Fp8Cast(NamedTuple):
    """How an operand is quantised."""

    dtype: torch.dtype
    is_rowwise: bool
    """A scale for each row (column of the second operand) along what the product sums over, or
    one for all that is on this rank."""
    is_block: bool = False
    """A scale for each 128 numbers along what the product sums over, of weights for each 128 x 128.
    Both operands of a product have such casts, and those of a weight's gradient have none."""

    @property
    def first(self) -> Tile:
        """What a scale covers where this is the first operand of a product."""
        if self.is_block:
            return (1, BLOCK)
        return (1, ALL) if self.is_rowwise else (ALL, ALL)

    @property
    def second(self) -> Tile:
        """What a scale covers where this is the second operand of a product, a weight if the scale
        is that of a block."""
        if self.is_block:
            return (BLOCK, BLOCK)
        return (ALL, 1) if self.is_rowwise else (ALL, ALL)


class Fp8Recipe(NamedTuple):
    """The casts of the three products of a linear layer, as ``torchao.float8.Float8LinearConfig``
    has them: of the output, of the input's gradient and of the weight's."""

    input: Fp8Cast
    weight: Fp8Cast
    grad_output: Fp8Cast
    weight_for_grad_input: Fp8Cast
    input_for_grad_weight: Fp8Cast | None
    """None: the weight's gradient is made of operands as they are, not of fp8 ones."""
    grad_output_for_grad_weight: Fp8Cast | None
    power_of_2: bool
    """Whether what values are multiplied with is rounded down to a power of two."""
    fast_accum: tuple[bool, bool, bool]
    """`fast_accum` of each of the three products, see `agmm.all_gather_scaled_matmul`."""

    @classmethod
    def of_torchao(cls, config: Any) -> Fp8Recipe:
        """The recipe of a ``torchao.float8.Float8LinearConfig``.

        Raises:
            InvalidArgument: the output or the input's gradient is not made of fp8 operands, the
                dtypes are not those of NVIDIA's GPUs, or FSDP gathers fp8 weights.
        """
        if config.enable_fsdp_float8_all_gather:
            raise InvalidArgument(
                "fp8: found enable_fsdp_float8_all_gather=True, wanted False: the weights of "
                "agmm's styles are sharded in their own dtype"
            )
        products = (
            config.gemm_config_output,
            config.gemm_config_grad_input,
            config.gemm_config_grad_weight,
        )
        output, grad_input, grad_weight = (bool(p.use_fast_accum) for p in products)
        return cls(
            _cast("cast_config_input", config.cast_config_input),
            _cast("cast_config_weight", config.cast_config_weight),
            _cast("cast_config_grad_output", config.cast_config_grad_output),
            _cast("cast_config_weight_for_grad_input", config.cast_config_weight_for_grad_input),
            _maybe_cast("cast_config_input_for_grad_weight", config),
            _maybe_cast("cast_config_grad_output_for_grad_weight", config),
            bool(config.round_scales_to_power_of_2),
            (output, grad_input, grad_weight),
        )

    @property
    def name(self) -> str:
        """The name by which a layer takes it, or "own" where it has none."""
        return next((name for name, recipe in _NAMED.items() if recipe == self), "own")

    @property
    def quantises_gates(self) -> bool:
        """Whether a gated product may be quantised as the next layer's input by the kernel that
        computes it, which rounds no scales."""
        return self.input.is_block and self.input.dtype == _E4M3 and not self.power_of_2


def _maybe_cast(name: str, config: Any) -> Fp8Cast | None:
    found = getattr(config, name)
    return None if found.scaling_type.value == "disabled" else _cast(name, found)


def _cast(name: str, found: Any) -> Fp8Cast:
    if found.scaling_type.value != "dynamic":
        raise InvalidArgument(
            f"fp8: found {name} with scaling_type={found.scaling_type.value}, wanted dynamic: "
            "only the weight's gradient may be made of operands that are not fp8"
        )
    if found.target_dtype not in FP8:
        raise InvalidArgument(f"fp8: found {name} to {found.target_dtype}, wanted one of {FP8}")
    return Fp8Cast(found.target_dtype, found.scaling_granularity.value == "axiswise")


_OF_ALL, _OF_ROWS = Fp8Cast(_E4M3, False), Fp8Cast(_E4M3, True)
_OF_GRADIENT = Fp8Cast(_E5M2, False)
# Only the forward leaves its sums to the tensor cores, in all of torchao's recipes.
_FAST = (True, False, False)

RECIPES = {
    "tensorwise": Fp8Recipe(
        _OF_ALL, _OF_ALL, _OF_GRADIENT, _OF_ALL, _OF_ALL, _OF_GRADIENT, False, _FAST
    ),
    "rowwise": Fp8Recipe(_OF_ROWS, _OF_ROWS, _OF_ROWS, _OF_ROWS, _OF_ROWS, _OF_ROWS, True, _FAST),
    "rowwise_with_gw_hp": Fp8Recipe(_OF_ROWS, _OF_ROWS, _OF_ROWS, _OF_ALL, None, None, True, _FAST),
}
"""The recipes that torchao has names for (`Float8LinearConfig.from_recipe_name`)."""


_OF_BLOCKS = Fp8Cast(_E4M3, False, is_block=True)
BLOCK_RECIPE = Fp8Recipe(
    *(_OF_BLOCKS, _OF_BLOCKS, _OF_BLOCKS, _OF_BLOCKS, None, None),
    power_of_2=False,
    fast_accum=(False, False, False),
)
"""The recipe of agmm alone: what DeepSeek-V3's report has for the output and the input's gradient,
scales of 1 x 128 of activations and 128 x 128 of weights."""

_NAMED = {**RECIPES, "block": BLOCK_RECIPE}


WHY_NOT_SAVED = (
    "save_gathered: found True with fp8, wanted False: the rows that the forward gathers are "
    "quantised for it alone, the weight's gradient wants them with scales over all rows, or not "
    "quantised"
)
"""Why no layer and no style keeps the gathered input with fp8: no recipe uses it again."""


def resolved(fp8: str | Fp8Recipe | None) -> Fp8Recipe | None:
    """The recipe that was given as such or by its name.

    Raises:
        InvalidArgument: it is neither, or some of its casts have scales of blocks where no product
            takes them.
    """
    if isinstance(fp8, Fp8Recipe):
        _check_blocks(fp8)
    if fp8 is None or isinstance(fp8, Fp8Recipe):
        return fp8
    if isinstance(fp8, str) and fp8 in _NAMED:
        return _NAMED[fp8]
    names = ", ".join(repr(name) for name in _NAMED)
    raise InvalidArgument(f"fp8: found {fp8!r}, wanted {names}, an Fp8Recipe or None")


def _check_blocks(recipe: Fp8Recipe) -> None:
    for name, value in recipe._asdict().items():
        if isinstance(value, Fp8Cast) and value.is_block and value.is_rowwise:
            raise InvalidArgument(
                f"fp8: found {name} with scales of rows and of blocks, wanted one"
            )
    pairs = ("input", "weight"), ("grad_output", "weight_for_grad_input")
    for names in pairs:
        of_first, of_second = (getattr(recipe, name).is_block for name in names)
        if of_first != of_second:
            raise InvalidArgument(
                f"fp8: found scales of blocks for one of {names[0]} and {names[1]}, wanted them "
                "for both or none"
            )
    for name in ("input_for_grad_weight", "grad_output_for_grad_weight"):
        cast = getattr(recipe, name)
        if cast is not None and cast.is_block:
            raise InvalidArgument(f"fp8: found {name} with scales of blocks, wanted others or None")


def of_module(module: torch.nn.Module) -> Fp8Recipe | None:
    """The recipe of a ``Float8Linear`` of torchao; None for any other module."""
    torchao = sys.modules.get("torchao.float8.float8_linear")
    if torchao is None or type(module) is not torchao.Float8Linear:
        return None
    return Fp8Recipe.of_torchao(module.config)
