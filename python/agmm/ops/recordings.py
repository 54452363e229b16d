"""`agmm.record`: the calls of a program as a file, which the commands of agmm read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agmm import _core, _env
from agmm.errors import InvalidArgument, warn_once, why_unread
from agmm.ops import seen
from agmm.planning import call_plans
from agmm.planning.problems import ALL_GATHER_MATMUL, CPU, MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from agmm.runtime.epilogues import ACTIVATIONS

VERSION = 1

_KIND = "agmm calls"
_OPS = {
    "all_gather_matmul": ALL_GATHER_MATMUL,
    "all_gather_scaled_matmul": ALL_GATHER_MATMUL,
    "matmul_reduce_scatter": MATMUL_REDUCE_SCATTER,
    "scaled_matmul_reduce_scatter": MATMUL_REDUCE_SCATTER,
    "matmul_all_reduce": MATMUL_ALL_REDUCE,
    "matmul_all_reduce_rms_norm": MATMUL_ALL_REDUCE,
    "scaled_matmul_all_reduce": MATMUL_ALL_REDUCE,
}


@dataclass(frozen=True)
class RecordedCall:
    """Calls of one kind. `gpu` is `Problem.gpu` of the device that they were made on, of which the
    kind, read from a file, has the type alone."""

    kind: seen.Kind
    gpu: str
    count: int

    @property
    def planned_op(self) -> str:
        """The op by the name that plans have for it."""
        return _OPS[self.kind.op]


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes the calls that this process makes meanwhile into a file, when the context ends.

    ``agmm tune --file``, ``agmm bench --file`` and ``agmm explain --file`` read it. It has each
    kind of call (op, shapes, layouts, dtype, scales, number of ranks) with its count. All calls of
    the ops are counted, also compiled ones; those in a CUDA graph when they are captured.
    ``AGMM_RECORD`` does the same for a whole process. Calls of `agmm.collectives` and of mixtures
    of experts are not recorded.

    Args:
        path: of the file, which is replaced as a whole. Rank 0 of all ranks writes it; with
            ``{rank}`` in the name every rank writes a file of its own.

    Raises:
        InvalidArgument: the file cannot be written; when the context begins, where that is seen.
    """
    name = os.fspath(path)
    folder = Path(name).parent
    if not folder.is_dir():
        raise InvalidArgument(f"path: found {name}, wanted a file in a folder that is there")
    with seen.counting(_OPS) as made:
        yield
    where = _of_this_rank(name)
    if where is not None:
        _replace(where, _to_text(made.of))
        if made.others:
            warn_once(f"{name}: {_left_out(made.others)}")


def _left_out(calls: int) -> str:
    return (
        f"found more than {seen.MAX_KINDS} kinds of calls, {calls} calls of further ones are left "
        "out"
    )


def write_at_end(variable: str, name: str, text: str) -> None:
    """Writes what an environment variable asks for; a line says where that fails, since a process
    that ends can raise nothing."""
    try:
        where = _of_this_rank(name)
        if where is not None:
            _replace(where, text)
    except InvalidArgument as error:
        _core.write_line(f"agmm: {variable}: {error}")


def _write_recording() -> None:
    name = os.environ.get(_env.RECORD.name)
    if name and _of_process is not None:
        write_at_end(_env.RECORD.name, name, _to_text(_of_process.of))
        if _of_process.others and _of_this_rank(name) is not None:
            _core.write_line(f"agmm: {_env.RECORD.name}: {name}: {_left_out(_of_process.others)}")


_of_process = seen.count_from_now(_OPS) if os.environ.get(_env.RECORD.name) else None
seen.at_end(_write_recording)


def _of_this_rank(name: str) -> Path | None:
    """The file that this rank writes, or None."""
    rank = dist.get_rank() if dist.is_initialized() else seen.rank
    if "{rank}" in name:
        return Path(name.replace("{rank}", str(rank)))
    return Path(name) if rank == 0 else None


def _to_text(counts: dict[seen.Kind, int]) -> str:
    calls = []
    for kind, count in counts.items():
        if kind.op in _OPS:
            fields = kind._asdict()
            gpu = call_plans.device_facts(fields.pop("device"))[0]
            calls.append(fields | {"gpu": gpu, "count": count})
    lines = ",\n".join(json.dumps(call) for call in calls)
    return f'{{"kind": "{_KIND}", "version": {VERSION}, "calls": [\n{lines}\n]}}\n'


def _replace(path: Path, text: str) -> None:
    """Replaces a file, which is the old one or the new one at any time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"path: {path} cannot be written ({error.strerror or error})"
        ) from None


def is_recording(text: str) -> bool:
    """Whether a text is meant to be a recording, and no list of shapes."""
    return text.lstrip().startswith(("{", "["))


def read(path: Path) -> list[RecordedCall]:
    """The calls of a file that `record` has written.

    Raises:
        InvalidArgument: it cannot be read, is of another version, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"file: {path} cannot be read ({why_unread(error)})") from None
    except ValueError as error:
        raise InvalidArgument(f"file: {path} is not JSON ({error})") from None
    wanted = f"wanted a recording of agmm.record, version {VERSION}"
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise InvalidArgument(f"file: found no recording in {path}, {wanted}")
    if found.get("version") != VERSION:
        raise InvalidArgument(f"file: found version {found.get('version')} in {path}, {wanted}")
    if not isinstance(found.get("calls"), list):
        raise InvalidArgument(f"file: found no list of calls in {path}, {wanted}")
    return [_read_call(entry, f"call {i} of {path}") for i, entry in enumerate(found["calls"])]


_FIELDS = (*(name for name in seen.Kind._fields if name != "device"), "gpu", "count")
_SIZES = ("m", "k", "products", "world_size", "count")
_TEXTS = ("dtype", "gpu", "by")


def _read_call(entry: Any, where: str) -> RecordedCall:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"file: found {entry!r} as {where}, wanted an object")
    entry = {"activation": None, "residual": False, **entry}  # which older versions did not write
    missing = [name for name in _FIELDS if name not in entry]
    if missing:
        raise InvalidArgument(f"file: found no {', '.join(missing)} in {where}, wanted all fields")
    n = entry["n"]
    if not isinstance(n, list) or not n:
        raise InvalidArgument(f"file: found n {n!r} in {where}, wanted a list of numbers")
    sizes = [(name, entry[name]) for name in _SIZES] + [("n", one) for one in n]
    for name, size in sizes:
        # A call without elements has sizes of 0.
        if type(size) is not int or size < 0:
            raise InvalidArgument(f"file: found {name} {size!r} in {where}, wanted a number")
    for name in _TEXTS:
        if not isinstance(entry[name], str):
            raise InvalidArgument(f"file: found {name} {entry[name]!r} in {where}, wanted a text")
    choices: list[tuple[str, tuple[Any, ...]]] = [
        ("op", tuple(_OPS)),
        ("b_layout", ("column", "row", "packed")),
        ("return_A", (False, True)),
        ("residual", (False, True)),
        ("activation", (None, *ACTIVATIONS)),
        ("scaling", (None, "tensorwise", "rowwise", "block", "block 1x128")),
    ]
    for name, values in choices:
        if entry[name] not in values:
            raise InvalidArgument(
                f"file: found {name} {entry[name]!r} in {where}, wanted one of {values}"
            )
    known = {name: entry[name] for name in _FIELDS} | {"n": tuple(n)}
    gpu, count = known.pop("gpu"), known.pop("count")
    device = torch.device("cpu" if gpu == CPU else "cuda")
    return RecordedCall(seen.Kind(**known, device=device), gpu, count)
