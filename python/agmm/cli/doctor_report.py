"""What `agmm doctor --report` prints: plain text for an issue, which names no host and no path."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Sequence
from typing import Any

from agmm import _env
from agmm.cli.findings import Finding, as_text

_SHARED_MEMORY = "/dev/shm"
_PATH = re.compile(
    r"(?<=')~?/[^']*(?=')"  # a quoted one may have blanks
    r"|\bfile://\S+"
    r"|(?<![\w/.])~?(?:/[^\s/:;,'\")]+){2,}/?"
    r"|(?<![\w/.])/(?:root|home)\b"
)
_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
_NAME_FILES = (_env.CACHE_DIR, _env.RECORD, _env.REPORT)
"""The variables whose values are files and folders, also where they do not look like paths."""


def report(facts: dict[str, Any], found: Sequence[Finding], links: Sequence[str]) -> str:
    """Return the report from what `agmm doctor` found."""
    versions = (
        f"{name} {facts[name]}"
        for name in ("agmm", "python", "torch", "cuda", "nccl", "driver")
        if facts.get(name) is not None
    )
    head = [
        "agmm doctor --report",
        f"machine: {facts['device_name']}, {len(facts['gpus'])} GPUs, {facts['host_cores']} cores",
        f"versions: {', '.join(versions)}",
    ]
    return without_names("\n".join([*head, as_text(list(found)), *links]))


def without_names(text: str) -> str:
    """Return a text in which `<host>`, `<path>` and `<gpu>` stand for names of hosts, paths and
    GPUs. `/dev/shm` stays, since it is the same everywhere."""
    for variable in _NAME_FILES:
        text = re.sub(rf"\b{variable.name}=[^;\n]*?(?=; |: |\n|$)", f"{variable.name}=<path>", text)
    host = socket.gethostname()
    names = {host, host.split(".")[0], os.environ.get("HOSTNAME", ""), platform.node()}
    for name in sorted(filter(None, names), key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", text)
    text = _PATH.sub(lambda m: m[0] if m[0].startswith(_SHARED_MEMORY) else "<path>", text)
    return _UUID.sub("<gpu>", text)
