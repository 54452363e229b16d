"""The transports by their names. This module needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agmm.planning.problems import NUMBER
from agmm.planning.transports import (
    BACKEND,
    GATHER,
    LAGGED,
    PORTABLE,
    PULL,
    PUSH,
    SCATTER,
    STREAMED,
    TORCH,
    SmPush,
    Transport,
)


@dataclass(frozen=True)
class Unknown(Transport):
    """A transport of another version's table. No plan with it is legal."""

    text: str

    @property
    def name(self) -> str:
        return self.text


_BY_NAME: dict[str, Transport] = {
    one.name: one
    for one in (PUSH, PULL, GATHER, BACKEND, TORCH, LAGGED, SCATTER, PORTABLE, STREAMED)
}
_SM_PUSH_NAME = re.compile(rf"sm({NUMBER})x([1-9][0-9]{{0,8}})(?:\+({NUMBER})|h({NUMBER}))?")


def parse(name: str) -> Transport:
    """The transport of that `Transport.name`; an `Unknown` one for every other string."""
    known = _BY_NAME.get(name)
    if known is not None:
        return known
    found = _SM_PUSH_NAME.fullmatch(name)
    return Unknown(name) if found is None else SmPush(*(int(text or 0) for text in found.groups()))
