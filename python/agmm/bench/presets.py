"""The shapes that have names: the projections that a tensor-parallel rank computes of a model,
column-parallel ones for an all-gather and row-parallel ones for a reduce-scatter, and the options
by which `agmm tune` and `agmm bench` name shapes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agmm.bench import moe_presets
from agmm.errors import InvalidArgument, why_unread
from agmm.planning.problems import ALL_GATHER_MATMUL, COLLECTIVES, MOE, UNDIVIDED
from agmm.planning.shapes import AnyShape, MoEShape, Shape, TensorShape


@dataclass(frozen=True)
class Projection:
    """The projection ``[tokens, k] @ [k, n]`` on one rank; n, or k of a row-parallel one, is that
    rank's share."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Attention:
    """A model with grouped-query attention; sizes are columns per head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int

    def projections(self, tp: int) -> list[Projection]:
        """QKV as one weight and gate/up as one weight. Key and value heads are repeated where
        there are more ranks than such heads."""
        self._check(tp)
        heads = self.heads // tp + 2 * max(1, self.kv_heads // tp)
        return [
            Projection("qkv", heads * self.head_dim, self.hidden),
            Projection("gate_up", 2 * _share(self.feed_forward, tp), self.hidden),
        ]

    def row_projections(self, tp: int) -> list[Projection]:
        """The row-parallel projections: the output of the attention, and down."""
        self._check(tp)
        return [
            Projection("attention_out", self.hidden, self.heads // tp * self.head_dim),
            Projection("down", self.hidden, _share(self.feed_forward, tp)),
        ]

    def _check(self, tp: int) -> None:
        if self.heads % tp or max(tp, self.kv_heads) % min(tp, self.kv_heads):
            raise InvalidArgument(
                f"tp: found {tp}, wanted a divisor of {self.heads} heads that goes with "
                f"{self.kv_heads} key and value heads"
            )


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention with a mixture of experts (DeepSeek-V3). ``values``: columns of
    the values of all heads."""

    hidden: int
    q_rank: int
    kv_rank: int
    rope_dim: int
    values: int
    feed_forward: int
    shared_experts: int

    def projections(self, tp: int) -> list[Projection]:
        """The down projections of Q and KV as one weight, the same on every rank, and gate/up of
        the dense layers and of the shared experts."""
        return [
            Projection("qkv_down", self.q_rank + self.kv_rank + self.rope_dim, self.hidden),
            Projection("gate_up", 2 * _share(self.feed_forward, tp), self.hidden),
            Projection("shared_gate_up", 2 * _share(self.shared_experts, tp), self.hidden),
        ]

    def row_projections(self, tp: int) -> list[Projection]:
        """The output of the attention, and down of the dense layers and of the shared experts."""
        return [
            Projection("attention_out", self.hidden, _share(self.values, tp)),
            Projection("down", self.hidden, _share(self.feed_forward, tp)),
            Projection("shared_down", self.hidden, _share(self.shared_experts, tp)),
        ]


def _share(columns: int, tp: int) -> int:
    if columns % tp:
        raise InvalidArgument(f"tp: found {tp}, wanted a divisor of {columns} columns")
    return columns // tp


MODELS: dict[str, Attention | LatentAttention] = {
    "llama-3-8b": Attention(4096, 32, 8, 128, 14336),
    "llama-3-70b": Attention(8192, 64, 8, 128, 28672),
    "qwen-2.5-7b": Attention(3584, 28, 4, 128, 18944),
    "qwen-2.5-72b": Attention(8192, 64, 8, 128, 29568),
    "deepseek-v3": LatentAttention(7168, 1536, 512, 64, 16384, 18432, 2048),
}
"""The models by name; the sizes are those of their published configurations."""


def shapes(model: str, tokens: list[int], tp: int, op: str = ALL_GATHER_MATMUL) -> list[Shape]:
    """The projections of a model that call the op, at each token count (the rows of all ranks, M).

    Raises InvalidArgument for an unknown model or a ``tp`` that does not divide it.
    """
    found = _model(model)
    is_gather = op == ALL_GATHER_MATMUL
    projections = found.projections(tp) if is_gather else found.row_projections(tp)
    widths = {(p.n, p.k): None for p in projections}
    return [Shape(m, n, k) for n, k in widths for m in tokens]


def _model(name: str) -> Attention | LatentAttention:
    if name not in MODELS:
        raise InvalidArgument(f"model: found {name!r}, wanted one of {', '.join(MODELS)}")
    return MODELS[name]


def kind_of(op: str) -> type[AnyShape]:
    """The kind of shapes that an op has."""
    if op == MOE:
        return MoEShape
    return TensorShape if op in COLLECTIVES else Shape


def parse_tokens(text: str) -> list[int]:
    """``"512..32768"`` is 512, 1024, ..., 32768 (doubling); ``"512,1000"`` is just these.

    Raises InvalidArgument for anything else.
    """
    wanted = "wanted a range that is doubled through, such as 512..32768, or a list such as 512,768"
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            tokens = []
            while 0 < first <= last:
                tokens.append(first)
                first *= 2
        else:
            tokens = [int(part) for part in text.split(",")]
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 1:
        raise InvalidArgument(f"tokens: found {text!r}, {wanted}")
    return tokens


DEFAULT_TOKENS = "512..32768"


@dataclass(frozen=True)
class ShapeOptions:
    """The options of a command that name shapes, as given. `extents` are --m, --n and --k; None
    where the command has no such options."""

    shapes: str | None = None
    file: Path | None = None
    model: str | None = None
    tokens: str | None = None
    extents: tuple[int | None, int | None, int | None] | None = None
    routing: str | None = None
    """How a router spreads the tokens of a mixture of experts."""

    @property
    def given(self) -> bool:
        """Whether any of these options was given."""
        return self._count() > 0 or self.tokens is not None

    def read_moe(self) -> list[MoEShape]:
        """The mixtures of experts that they name.

        Raises InvalidArgument where they are not named in exactly one way, or cannot be read.
        """
        self.check_one()
        routings = moe_presets.parse_routings(self.routing)
        if self.model is not None:
            tokens = parse_tokens(self.tokens or DEFAULT_TOKENS)
            return moe_presets.moe_shapes(self.model, tokens, routings)
        self._check_tokens()
        if self.file is not None:
            return moe_presets.parse_moe_shapes(_text_of(self.file), str(self.file), routings)
        if self.shapes is None:
            raise InvalidArgument("shape: found --m, --n or --k with moe, wanted --shapes")
        return moe_presets.parse_moe_shapes(self.shapes, "--shapes", routings)

    def read_tensors(self, op: str) -> list[TensorShape]:
        """The tensors of a collective that they name, those of a model by its hidden features.

        Raises InvalidArgument where they are not named in exactly one way, or cannot be read.
        """
        self._check_routing(op)
        self.check_one()
        if self.model is not None:
            hidden = _model(self.model).hidden
            return [TensorShape(m, hidden) for m in parse_tokens(self.tokens or DEFAULT_TOKENS)]
        self._check_tokens()
        if self.extents is not None and any(e is not None for e in self.extents):
            m, n, k = self.extents
            if n is not None:
                raise InvalidArgument(f"n: found {n}, wanted none for {op}, of --m rows by --k")
            if m is None or k is None:
                raise InvalidArgument(f"shape: found no --m or --k, wanted both for {op}")
            return [TensorShape(m, k)]
        text = self.shapes if self.file is None else _text_of(self.file)
        origin = "--shapes" if self.file is None else str(self.file)
        found = [TensorShape.parse(part) for part in split(text or "")]
        if not found:
            raise InvalidArgument(f"shapes: found none in {origin}, wanted MxK")
        return list(dict.fromkeys(found))

    def read(self, tp: int, op: str = ALL_GATHER_MATMUL) -> list[Shape]:
        """The shapes that they name, for `tp` ranks and the op.

        Raises InvalidArgument where they are not named in exactly one way, or cannot be read.
        """
        self._check_routing(op)
        self.check_one()
        if self.model is not None:
            return shapes(self.model, parse_tokens(self.tokens or DEFAULT_TOKENS), tp, op)
        self._check_tokens()
        if self.file is not None:
            return parse_shapes(_text_of(self.file), str(self.file))
        if self.shapes is not None:
            return parse_shapes(self.shapes, "--shapes")
        m, n, k = self.extents or (None, None, None)
        if m is None or n is None or k is None:
            given = " ".join(
                f"--{name} {extent}"
                for name, extent in zip("mnk", (m, n, k), strict=True)
                if extent is not None
            )
            raise InvalidArgument(f"shape: found {given} alone, wanted --m, --n and --k")
        return [Shape(m, n, k)]

    def _check_routing(self, op: str) -> None:
        if self.routing is not None:
            raise InvalidArgument(f"routing: found {self.routing!r} with {op}, wanted --op moe")

    def _check_tokens(self) -> None:
        if self.tokens is not None:
            raise InvalidArgument(f"tokens: found {self.tokens!r} without --model, wanted both")

    def check_one(self) -> None:
        """Raises InvalidArgument where shapes are not named in exactly one way."""
        if self._count() != 1:
            extents = "" if self.extents is None else "--m --n --k, "
            raise InvalidArgument(
                f"shapes: found {self._count()} ways to name them, wanted one of {extents}"
                "--shapes, --file, --model"
            )

    def _count(self) -> int:
        by_extent = self.extents is not None and any(e is not None for e in self.extents)
        named = (self.shapes is not None, self.file is not None, self.model is not None)
        return sum((by_extent, *named))


def _text_of(file: Path) -> str:
    """The lines of a file without their comments, as a comma-separated list."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"file: {file} cannot be read ({why_unread(error)})") from None
    return ",".join(line.partition("#")[0] for line in lines)


_Some = TypeVar("_Some", Shape, MoEShape, TensorShape)


def shared_equally(
    shapes: list[_Some], tp: int, op: str = ALL_GATHER_MATMUL
) -> tuple[list[_Some], list[str]]:
    """The shapes whose rows the ranks can share equally, where the op wants that, and a line for
    each other one; all of them where there is no such shape, whose error then says so."""
    if op in UNDIVIDED:
        return shapes, []
    served = [shape for shape in shapes if shape.M % tp == 0]
    if not served:
        return shapes, []
    lines = [
        f"left out {shape}: M: found {shape.M}, wanted a multiple of the world size, {tp}"
        for shape in shapes
        if shape.M % tp
    ]
    return served, lines


def parse_shapes(text: str, origin: str) -> list[Shape]:
    """Parses comma-separated MxNxK, each once. Raises InvalidArgument, also for none; its message
    names `origin`."""
    found = [Shape.parse(part) for part in split(text)]
    if not found:
        raise InvalidArgument(f"shapes: found none in {origin}, wanted MxNxK")
    return list(dict.fromkeys(found))


def split(text: str) -> list[str]:
    """The entries of a comma-separated list, without blanks and empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]
