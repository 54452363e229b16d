"""Switches in the environment."""

from __future__ import annotations

import pytest

from agmm import _env
from agmm.errors import InvalidArgument


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, False), ("", False), ("off", False), ("on", True)]
)
def test_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: bool) -> None:
    if value is None:
        monkeypatch.delenv(_env.SHARED_GPUS.name, raising=False)
    else:
        monkeypatch.setenv(_env.SHARED_GPUS.name, value)
    assert _env.is_on(_env.SHARED_GPUS) is wanted


def test_typo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.SHARED_GPUS.name, "yes")
    with pytest.raises(
        InvalidArgument, match=r"^AGMM_SHARED_GPUS: found 'yes', wanted 'on' or 'off'$"
    ):
        _env.is_on(_env.SHARED_GPUS)
