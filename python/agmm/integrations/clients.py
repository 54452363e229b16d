"""What integrations share: which versions of a library were tried, and what was put in its place.

It imports none of these libraries.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from agmm.errors import InvalidArgument


class Client(NamedTuple):
    """A library that agmm serves."""

    name: str
    """Its distribution."""
    first: tuple[int, ...]
    """The parts that count of the oldest version that was tried."""
    last: tuple[int, ...]
    """The newest one, in as many parts."""
    pinned: str
    """The version that is offered where there is none."""

    @property
    def wanted(self) -> str:
        """The versions in words."""
        first, last = (".".join(map(str, version)) for version in (self.first, self.last))
        return first if first == last else f"{first} to {last}"

    def check(self) -> tuple[int, ...]:
        """The parts that count of the version that is installed.

        Raises:
            InvalidArgument: the library is missing, or of a version that was not tried.
        """
        try:
            found = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            raise InvalidArgument(
                f"{self.name}: found none, wanted {self.wanted}: "
                f"pip install {self.name}=={self.pinned}"
            ) from None
        parts = found.split(".")[: len(self.first)]
        version = tuple(int(part) for part in parts if part.isdigit())
        if not self.first <= version <= self.last:
            raise InvalidArgument(f"{self.name}: found version {found}, wanted {self.wanted}")
        return version


class Replaced:
    """Values of a library in whose place agmm has put others, by their names."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._originals)

    def keep(self, originals: Iterable[tuple[str, Any]]) -> None:
        """Keeps what `give_back` puts back."""
        self._originals.update(originals)

    def __getitem__(self, name: str) -> Any:
        return self._originals[name]

    def give_back(self, put: Callable[[str, Any], object]) -> None:
        """Has ``put`` put each value back under its name."""
        while self._originals:
            put(*self._originals.popitem())
