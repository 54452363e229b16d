"""The shapes of named models."""

from __future__ import annotations

import pytest

from agmm.bench import presets
from agmm.errors import InvalidArgument
from agmm.planning.shapes import Shape


@pytest.mark.parametrize(
    ("model", "tp", "widths"),
    [
        ("llama-3-8b", 1, {(6144, 4096), (28672, 4096)}),
        ("llama-3-8b", 4, {(1536, 4096), (7168, 4096)}),
        ("llama-3-70b", 4, {(2560, 8192), (14336, 8192)}),
        ("llama-3-70b", 16, {(768, 8192), (3584, 8192)}),
        ("qwen-2.5-7b", 2, {(2304, 3584), (18944, 3584)}),
        ("qwen-2.5-72b", 8, {(1280, 8192), (7392, 8192)}),
        ("deepseek-v3", 4, {(2112, 7168), (9216, 7168), (1024, 7168)}),
    ],
)
def test_projections(model: str, tp: int, widths: set[tuple[int, int]]) -> None:
    shapes = presets.shapes(model, [512, 1024], tp)
    assert {(s.N, s.K) for s in shapes} == widths
    assert len(shapes) == 2 * len(widths)
    assert {s.M for s in shapes} == {512, 1024}
    assert shapes[0] == Shape(512, shapes[0].N, shapes[0].K)


@pytest.mark.parametrize(
    ("model", "tp", "widths"),
    [
        ("llama-3-8b", 1, {(4096, 4096), (4096, 14336)}),
        ("llama-3-70b", 4, {(8192, 2048), (8192, 7168)}),
        ("qwen-2.5-7b", 2, {(3584, 1792), (3584, 9472)}),
        ("deepseek-v3", 4, {(7168, 4096), (7168, 4608), (7168, 512)}),
    ],
)
def test_row_parallel_projections(model: str, tp: int, widths: set[tuple[int, int]]) -> None:
    shapes = presets.shapes(model, [512], tp, "matmul_reduce_scatter")
    assert {(s.N, s.K) for s in shapes} == widths
    with pytest.raises(InvalidArgument, match="tp: found 3, wanted a divisor of"):
        presets.shapes(model, [512], 3, "matmul_reduce_scatter")


@pytest.mark.parametrize(
    ("model", "tp", "words"),
    [
        ("llama-4", 4, "found 'llama-4', wanted one of llama-3-8b, "),
        ("qwen-2.5-7b", 8, "tp: found 8, wanted a divisor of 28 heads"),
        ("llama-3-70b", 3, "tp: found 3, wanted a divisor of 64 heads"),
        ("deepseek-v3", 5, "tp: found 5, wanted a divisor of 18432 columns"),
    ],
)
def test_bad_models(model: str, tp: int, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        presets.shapes(model, [512], tp)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("512..4096", [512, 1024, 2048, 4096]),
        ("500..1999", [500, 1000]),
        ("7..7", [7]),
        ("1000", [1000]),
        ("1000,96", [1000, 96]),
    ],
)
def test_tokens(text: str, tokens: list[int]) -> None:
    assert presets.parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "a", "8..4", "0..4", "1..2..3", "..", "1,", "-4", "4,0", "0.5"]
)
def test_bad_tokens(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^tokens: found "):
        presets.parse_tokens(text)
