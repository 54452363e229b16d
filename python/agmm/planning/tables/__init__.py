"""Tables of tuned plans: one JSON file per GPU and world size, packaged and the user's own.

The user's folder is ``AGMM_CACHE_DIR``, or `platformdirs`' cache folder; ``AGMM_CACHE=off`` leaves
it alone. Files are replaced as a whole, under a lock, so readers need none and writers lose no
rows of each other. A file that cannot be read is reported once and ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agmm import _env
from agmm.errors import AgmmError, InvalidArgument, warn_once
from agmm.planning import formats
from agmm.planning.plans import Plan, Row
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    MAX_CHUNKS_PER_SHARD,
    MAX_SIZE,
    PLAIN,
    KernelConfig,
    Problem,
)
from agmm.planning.transport_names import parse

SCHEMA = 5
_PLAIN = {"epilogue": PLAIN}
_ABSENT: dict[int, dict[str, Any]] = {
    1: {"op": ALL_GATHER_MATMUL, "accumulation": "", **_PLAIN},
    2: {"accumulation": "", **_PLAIN},
    3: _PLAIN,
    4: _PLAIN,
    SCHEMA: {},
}
"""The fields that all rows of a schema had in common and did not say, by schema."""
_WITH_DTYPES = (1, 2, 3)
"""The schemas whose rows had a dtype and an accumulation in place of a format, and no world
size."""
_PACKAGED = Path(__file__).parent
_LOCK_TIMEOUT_S = 30.0
_LONGEST_REASON = 200
"""The most characters that a message quotes of what is wrong in a file."""
_MOST_US = 1e9
"""The most µs that a call can have taken: about a quarter of an hour."""


class TableError(AgmmError):
    """A table that cannot be read or written; the message names the file."""


class NewerSchema(TableError):
    """A table of a later version of agmm."""


class OtherTable(TableError):
    """A table for another GPU or world size than its file's name says."""


class Key(NamedTuple):
    """The fields that all rows have in common that may serve one problem, M left out."""

    op: str
    format: str
    b_layout: str
    n: int
    k: int
    return_A: bool
    epilogue: str = PLAIN

    @classmethod
    def of(cls, problem: Problem) -> Key:
        return cls(*(getattr(problem, name) for name in cls._fields))


@dataclass(frozen=True)
class Table:
    """The rows of one file."""

    name: str
    by_key: dict[Key, dict[int, Row]]
    digest: str = ""
    """The hash of the file's bytes."""

    def rows(self, problem: Problem) -> Sequence[Row]:
        """The rows that differ from the problem in M alone, by rising M."""
        rows = self.by_key.get(Key.of(problem), {})
        return [rows[m] for m in sorted(rows)]


def gpu_name(device_name: str) -> str:
    """A GPU's name as in the names of the files: ``"NVIDIA H200"`` is ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def user_folder() -> Path | None:
    """The folder of the user's tables; None where AGMM_CACHE switches it off.

    Raises:
        TableError: AGMM_CACHE is neither "on" nor "off".
    """
    try:
        if not _env.is_on(_env.CACHE):
            return None
    except InvalidArgument as error:
        raise TableError(str(error)) from None
    given = os.environ.get(_env.CACHE_DIR.name)
    if given:
        return Path(given)
    import platformdirs  # only here: most processes are told the folder or find no file

    return Path(platformdirs.user_cache_dir("agmm", appauthor=False))


def file_name(gpu: str, world_size: int) -> str:
    return f"{gpu}-x{world_size}.json"


def read(path: Path, name: str | None = None, *, of: tuple[str, int] | None = None) -> Table:
    """The table in a file; `of` is the GPU and the world size that it should be for.

    Raises:
        FileNotFoundError: there is none.
        NewerSchema: it is of a later version.
        OtherTable: it is for something else.
        TableError: it cannot be read, or is no table.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        body = json.loads(content)
        schema = body["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            raise NewerSchema(f"{path}: found schema {schema}, wanted at most {SCHEMA}")
        if schema not in _ABSENT or isinstance(schema, bool):
            raise ValueError(f"schema {schema!r}")
        found_for = body["gpu"], body["world_size"]
        if of is not None and found_for != of:
            raise OtherTable(
                f"{path}: found a table for {found_for[0]} and {found_for[1]} ranks, wanted one "
                f"for {of[0]} and {of[1]}"
            )
        by_key: dict[Key, dict[int, Row]] = {}
        for entry in body["rows"]:
            entry = {**entry, **_ABSENT[schema]}
            if schema in _WITH_DTYPES:
                entry = _with_format(entry, found_for[1])
            key, row = _row_from_json(entry, found_for[1])
            by_key.setdefault(key, {})[row.m] = row
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        raise TableError(f"{path}: found a corrupt table ({found}), wanted JSON rows") from None
    return Table(name or str(path), by_key, hashlib.sha256(content).hexdigest())


def packaged(gpu: str, world_size: int) -> Table | None:
    """The table that comes with agmm, or None."""
    file = file_name(gpu, world_size)
    with contextlib.suppress(FileNotFoundError):
        return read(_PACKAGED / file, f"packaged table {file}", of=(gpu, world_size))
    return None


def user(gpu: str, world_size: int) -> Table | None:
    """The user's table, or None; one that cannot be used is reported once and ignored."""
    try:
        folder = user_folder()
        if folder is None:
            return None
        return read(folder / file_name(gpu, world_size), of=(gpu, world_size))
    except FileNotFoundError:
        return None
    except TableError as error:
        warn_once(f"agmm ignores a table of plans: {error}")
        return None


def known_gpus() -> set[str]:
    """The GPUs that have a table, packaged or the user's."""
    folders = [_PACKAGED]
    with contextlib.suppress(TableError):
        folders += [folder] if (folder := user_folder()) is not None else []
    names = (path.stem for folder in folders for path in folder.glob("*-x*.json"))
    return {found[1] for name in names if (found := re.fullmatch(r"(.+)-x\d+", name))}


def save(gpu: str, world_size: int, rows: Iterable[tuple[Key, Row]]) -> Path:
    """Adds rows to the user's table, in place of those of the same problems; returns its path.

    A corrupt file is kept beside the new one as ``*.corrupt``.

    Raises:
        TableError: they could not be written; the file is as it was.
    """
    from filelock import FileLock

    folder = user_folder()
    if folder is None:
        raise TableError(f"{_env.CACHE.name}: found 'off', wanted 'on' to keep what was tuned")
    path = folder / file_name(gpu, world_size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            by_key = _current(path, (gpu, world_size))
            for key, row in rows:
                by_key.setdefault(key, {})[row.m] = row
            _replace(path, to_text(gpu, world_size, by_key))
    except OSError as error:
        raise TableError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def check_folder() -> None:
    """Checks that tables can be written into the user's folder, which is made where it is missing.
    Nothing is checked with ``AGMM_CACHE=off``.

    Raises:
        TableError: they cannot.
    """
    folder = user_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise TableError(f"{folder}: cannot be written to ({error.strerror or error})") from None


def to_text(gpu: str, world_size: int, by_key: dict[Key, dict[int, Row]]) -> str:
    """A table as it stands in its file: one row a line, sorted."""
    entries = [
        json.dumps(_row_to_json(key, row, world_size))
        for key, rows in sorted(by_key.items())
        for _, row in sorted(rows.items())
    ]
    head = json.dumps({"schema": SCHEMA, "gpu": gpu, "world_size": world_size})[1:-1]
    return f'{{{head}, "rows": [\n' + ",\n".join(entries) + "\n]}\n"


def _current(path: Path, of: tuple[str, int]) -> dict[Key, dict[int, Row]]:
    try:
        return read(path, of=of).by_key
    except FileNotFoundError:
        return {}
    except (NewerSchema, OtherTable):
        raise
    except TableError:
        if not path.is_file() or not os.access(path, os.R_OK):
            raise
        aside = path.with_name(f"{path.name}.corrupt")
        os.replace(path, aside)
        warn_once(f"agmm keeps the corrupt {path} as {aside.name}")
        return {}


def _replace(path: Path, text: str) -> None:
    """Replaces a file, which is the old one or the new one at any time. It is to be called under
    the lock."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The JSON form of a plan in a row."""
    found: dict[str, Any] = {"transport": plan.transport.name}
    if plan.kernel is not None:
        found["kernel"] = plan.kernel.name
    if plan.chunks_per_shard != 1:
        found["chunks_per_shard"] = plan.chunks_per_shard
    return found


def plan_from_json(found: dict[str, Any]) -> Plan:
    """The plan of its JSON form in a row. Raises ValueError, KeyError or TypeError for what is no
    plan."""
    kernel = found.get("kernel")
    return Plan(
        parse(_typed(found["transport"], str)),
        None if kernel is None else KernelConfig.parse(kernel),
        _within(_typed(found.get("chunks_per_shard", 1), int), MAX_CHUNKS_PER_SHARD),
    )


def _row_to_json(key: Key, row: Row, world_size: int) -> dict[str, Any]:
    plan = plan_to_json(row.plan)
    times = {"us": row.us, "roof_us": row.roof_us, "unfused_us": row.unfused_us}
    times = {name: None if us is None else round(us, 2) for name, us in times.items()}
    problem = {
        "op": key.op,
        "format": key.format,
        "b_layout": key.b_layout,
        "world_size": world_size,
        "m": row.m,
        "n": key.n,
        "k": key.k,
        "return_A": key.return_A,
        "epilogue": key.epilogue,
    }
    return {**problem, "plan": plan, **times, "agmm": row.agmm}


def _row_from_json(entry: dict[str, Any], world_size: int) -> tuple[Key, Row]:
    key = Key(*(_typed(entry[name], kind) for name, kind in _KEY_TYPES.items()))
    for size in (key.n, key.k):
        _within(size, MAX_SIZE)
    if _typed(entry["world_size"], int) != world_size:
        raise ValueError(f"a row of {entry['world_size']} ranks among those of {world_size}")
    row = Row(
        _within(_typed(entry["m"], int), MAX_SIZE),
        plan_from_json(entry["plan"]),
        _time(entry["us"]),
        _time_or_none(entry["roof_us"]),
        _time_or_none(entry["unfused_us"]),
        _typed(entry["agmm"], str),
    )
    return key, row


def _with_format(entry: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Turns a row of an old schema into one of this."""
    dtype = _typed(entry["dtype"], str)
    accumulation = _typed(entry["accumulation"], str)
    name = formats.fp8_name(dtype, accumulation) if accumulation else dtype
    return {**entry, "format": name, "world_size": world_size}


_KEY_TYPES = {
    "op": str,
    "format": str,
    "b_layout": str,
    "n": int,
    "k": int,
    "return_A": bool,
    "epilogue": str,
}


def _time_or_none(us: Any) -> float | None:
    return None if us is None else _time(us)


def _time(us: Any) -> float:
    if type(us) not in (int, float):
        raise TypeError(f"{us!r} is no number")
    if not 0 < us <= _MOST_US:  # no NaN is
        raise ValueError(f"{us!r} is no time in µs up to {_MOST_US:g}")
    return float(us)


def _within(value: int, most: int) -> int:
    if not 1 <= value <= most:
        raise ValueError(f"{value!r} is not within 1 and {most}")
    return value


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
