"""The mixtures of experts that have names, and which of them a benchmark takes by default."""

from __future__ import annotations

from collections.abc import Sequence

from agmm.errors import InvalidArgument
from agmm.planning.shapes import ROUTINGS, AnyShape, MoEShape
from agmm.runtime.scaling import OF_EXPERTS

MOE_MODELS = {
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "mixtral-8x22b": (6144, 16384, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
}
"""The models by name: hidden and inner features, experts, and experts for each token, those of
their published configurations. Shared experts are left out."""
_FEW_AND_MANY = (1024, 8192)
"""The tokens of each rank that published figures of peers are of."""
_DEFAULT_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
_CPU_SIZES = (256, 64, 96, 8, 2)
"""A mixture that takes CPU ranks milliseconds."""


def moe_shapes(model: str, tokens: Sequence[int], routings: Sequence[str]) -> list[MoEShape]:
    """The experts of a model, at each number of tokens of all ranks and each routing.

    Raises InvalidArgument for an unknown model.
    """
    sizes = MOE_MODELS.get(model)
    if sizes is None:
        raise InvalidArgument(f"model: found {model!r}, wanted one of {', '.join(MOE_MODELS)}")
    return [MoEShape(m, *sizes, routing) for m in tokens for routing in routings]


def parse_routings(text: str | None) -> list[str]:
    """The routings of a comma-separated list; all of them for None. Raises InvalidArgument."""
    if text is None:
        return list(ROUTINGS)
    found = [part.strip() for part in text.split(",") if part.strip()]
    for one in found or [text]:
        if one not in ROUTINGS:
            raise InvalidArgument(f"routing: found {one!r}, wanted one of {', '.join(ROUTINGS)}")
    return found


def parse_moe_shapes(text: str, origin: str, routings: Sequence[str]) -> list[MoEShape]:
    """Parses comma-separated TOKENSxHIDDENxINNERxEXPERTSxK, each once and with each routing.

    Raises InvalidArgument, also for none; its message names `origin`.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found = [MoEShape.parse(part, routing) for part in parts for routing in routings]
    if not found:
        raise InvalidArgument(
            f"shapes: found none in {origin}, wanted TOKENSxHIDDENxINNERxEXPERTSxK"
        )
    return list(dict.fromkeys(found))


def default_shapes(device: str, world_size: int, routings: Sequence[str]) -> list[MoEShape]:
    """The mixtures that are measured where none is named."""
    if device == "cpu":
        return [MoEShape(*_CPU_SIZES, routing) for routing in routings]
    tokens = [each * world_size for each in _FEW_AND_MANY]
    return [shape for model in _DEFAULT_MODELS for shape in moe_shapes(model, tokens, routings)]


def checked(shapes: Sequence[AnyShape] | None, device: str, world_size: int) -> list[MoEShape]:
    """The shapes of a benchmark of mixtures, all that are measured by default for None.

    Raises InvalidArgument for experts that the ranks cannot share.
    """
    found = []
    given = default_shapes(device, world_size, ROUTINGS) if shapes is None else shapes
    for shape in given:
        if not isinstance(shape, MoEShape) or shape.experts % world_size:
            raise InvalidArgument(
                f"shape: found {shape}, wanted experts that {world_size} ranks can share"
            )
        found.append(shape)
    return found


def check_kind(scaling: str | None) -> None:
    """Raises InvalidArgument for a kind of scales that experts do not take."""
    kinds = [kind.name for kind in OF_EXPERTS]
    if scaling not in (None, *kinds):
        raise InvalidArgument(
            f"scaling: found {scaling!r} with moe, wanted one of {', '.join(map(repr, kinds))}"
        )
