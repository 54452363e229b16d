"""What the commands of `agmm` have in common: options, their types, and how errors are said."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agmm import _installation
from agmm.errors import AgmmError, InvalidArgument
from agmm.planning.shapes import MAX_EXTENT

INTERRUPTED = 130
"""The exit code after Ctrl-C, which shells give to what SIGINT ends."""


class Command(TyperCommand):
    """A command whose flags may be followed by true or false, as their <bool> in the help says,
    whose options take the usual other names of their values, and whose paragraphs of help fill the
    terminal's lines."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        text = inspect.cleandoc(keywords["help"] or "")
        keywords["help"] = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        super().__init__(*args, **keywords)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _as_choices(_as_flags(self.params, args)))


_BOOLS = {"true": True, "false": False}


def _as_flags(params: Iterable[Any], args: Iterable[str]) -> list[str]:
    """The arguments with "--flag true" and "--flag=true" as the flag, without "--flag false" and
    "--flag=false"."""
    flags = {n for param in params if getattr(param, "is_flag", False) for n in param.opts}
    found: list[str] = []
    for arg in args:
        name, has_value, value = arg.partition("=")
        if has_value and name in flags and value.lower() in _BOOLS:
            found += [name] if _BOOLS[value.lower()] else []
        elif found and found[-1] in flags and arg.lower() in _BOOLS:
            found = found if _BOOLS[arg.lower()] else found[:-1]
        else:
            found.append(arg)
    return found


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class DType(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    float8_e4m3fn = "float8_e4m3fn"


DTYPE_NAMES = {
    DType.bf16: "bfloat16",
    DType.fp16: "float16",
    DType.fp32: "float32",
    DType.float8_e4m3fn: "float8_e4m3fn",
}


class Scaling(str, Enum):
    """The kinds of scales that `agmm.runtime.scaling` has."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"
    block = "block"
    block_1x128 = "block 1x128"


class Op(str, Enum):
    all_gather_matmul = "all_gather_matmul"
    matmul_reduce_scatter = "matmul_reduce_scatter"
    matmul_all_reduce = "matmul_all_reduce"
    matmul_all_reduce_rms_norm = "matmul_all_reduce_rms_norm"
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    all_reduce_rms_norm = "all_reduce_rms_norm"
    moe = "moe"


class Layout(str, Enum):
    column = "column"
    row = "row"


_CHOICES: dict[str, type[Enum]] = {
    "--device": Device,
    "--op": Op,
    "--dtype": DType,
    "--scaling": Scaling,
    "--b-layout": Layout,
}
_OTHER_NAMES = {
    "--dtype": {
        "bfloat": "bf16",
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float": "fp32",
        "fp8": "float8_e4m3fn",
        "e4m3": "float8_e4m3fn",
    },
    "--device": {"gpu": "cuda"},
    "--scaling": {"1x128": "block 1x128"},
}
"""Names that people give to values, by option, beside the values' own."""


def _as_choices(args: list[str]) -> list[str]:
    """The arguments, in which the value of an option is the name that it is listed under.

    Raises:
        typer.BadParameter: a value is not known but looks like one that is.
    """
    found: list[str] = []
    for arg in args:
        name, has_value, value = arg.partition("=")
        if has_value and name in _CHOICES:
            found.append(f"{name}={_choice(name, value, _CHOICES[name])}")
        elif found and found[-1] in _CHOICES:
            found.append(_choice(found[-1], arg, _CHOICES[found[-1]]))
        else:
            found.append(arg)
    return found


def _choice(option: str, given: str, choices: type[Enum]) -> str:
    names = [str(one.value) for one in choices]
    if given in names:
        return given
    known = {_squeezed(name): name for name in names}
    known |= {_squeezed(other): name for other, name in _OTHER_NAMES.get(option, {}).items()}
    squeezed = _squeezed(given)
    if squeezed in known:
        return known[squeezed]
    close = difflib.get_close_matches(squeezed, known, 1)
    listed = ", ".join(names)
    if not close:
        return given
    raise typer.BadParameter(
        f"{option}: found {given!r}, wanted one of {listed}; did you mean {known[close[0]]!r}?"
    )


def _squeezed(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


Shapes = Annotated[
    str | None,
    typer.Option(
        help="MxNxK, comma-separated: M counts the rows of all ranks, N and K are of one rank. For "
        "moe TOKENSxHIDDENxINNERxEXPERTSxK, for a collective MxK, both of all ranks.",
        metavar="MxNxK,...",
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        help="A file with one MxNxK a line, where # begins a comment, or with the calls that "
        "agmm.record wrote.",
        dir_okay=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="The projections of this model: QKV and gate/up; for matmul_reduce_scatter and "
        "both matmul_all_reduce ops the attention's output and down; for moe its experts; for a "
        "collective its hidden features."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Gathered rows for --model: a..b doubles through, a,b,c lists. Default: 512..32768."
    ),
]
Routing = Annotated[
    str | None,
    typer.Option(
        help="For moe: how the router spreads the tokens; even, zipf or both.", metavar="even,zipf"
    ),
]
TP_NAMES = ("--tp", "--world-size")
Tp = Annotated[
    int | None,
    typer.Option(
        *TP_NAMES,
        min=1,
        metavar="N",
        help="Number of ranks. Default: 4, or as many as there are GPUs.",
    ),
]
Where = Annotated[
    Device, typer.Option(help="auto: GPUs where there are at least 2, else CPU processes.")
]
ElementType = Annotated[
    DType | None, typer.Option(help="Element type. Default: bf16 on GPUs, fp32 on the CPU.")
]
ScalingOf = Annotated[
    Scaling | None, typer.Option(help="Scales of float8_e4m3fn operands. Default: rowwise.")
]
OPS_LISTED = ", ".join(op.value for op in Op)
TunedOp = Annotated[
    Op | None,
    typer.Option(
        metavar="OP",
        help="Which call: all_gather_matmul, matmul_reduce_scatter or, on GPUs, matmul_all_reduce. "
        "Default: with --model the calls of a layer's forward and backward, with recorded calls "
        "all of them, else all_gather_matmul. M counts the rows of A before they are scattered.",
    ),
]
ColumnsOfB = Annotated[
    int | None,
    typer.Option("--n", min=1, max=MAX_EXTENT, metavar="COLUMNS", help="Columns of B per rank."),
]
LayoutOfB = Annotated[
    Layout | None,
    typer.Option(help="Default: column, a transposed [N, K] weight."),
]
ReturnA = Annotated[bool, typer.Option("--return-a", help="Take calls that also return A.")]


@contextlib.contextmanager
def one_line_errors(*, needs_agmm: bool = True) -> Iterator[None]:
    """Turns bad input, failing ranks, a missing extra, Ctrl-C and warnings into lines and an exit
    code. What needs agmm ends at once where it is broken, which has been said."""
    if needs_agmm and _installation.fault() is not None:
        raise typer.Exit(1)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *rest: print(f"agmm: {message}", file=sys.stderr)
            yield
    except KeyboardInterrupt:
        print("agmm: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except typer.Exit:
        raise
    except InvalidArgument as e:
        print(f"agmm: {e}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RuntimeError as e:
        from agmm.bench.figures import PlotUnavailable
        from agmm.testing.ranks import RankError

        if not isinstance(e, (AgmmError, RankError, PlotUnavailable)):
            raise
        print(f"agmm: {e}", file=sys.stderr)
        raise typer.Exit(1) from None


def say_why_cpu(device: Device, tp: int | None) -> None:
    from agmm.bench import launcher

    reason = launcher.why_cpu(device.value, launcher.world_size_or(tp))
    if reason is not None and launcher.is_rank_0():
        print(f"agmm: {reason}", file=sys.stderr)


def say_left_out(lines: Iterable[str]) -> None:
    """Says what a command leaves out, once among the ranks."""
    from agmm.bench import launcher

    if launcher.is_rank_0():
        for line in lines:
            print(f"agmm: {line}", file=sys.stderr)


def element_bytes(dtype: DType) -> int:
    """The size of an element, by the bits in the dtype's name."""
    found = re.search(r"\d+", DTYPE_NAMES[dtype])
    assert found is not None
    return int(found[0]) // 8


def torch_dtype(dtype: DType) -> Any:
    import torch

    return getattr(torch, DTYPE_NAMES[dtype])
