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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AGMM_TIMEOUT_S", "soon"),
        ("AGMM_WARN_S", "-1"),
        ("AGMM_CACHE", "maybe"),
        ("AGMM_SHARED_GPUS", "yes"),
        ("AGMM_EARLY_START", "no"),
        ("AGMM_RESERVED_SMS", "-1"),
        ("AGMM_RESERVED_SMS", "all"),
    ],
)
def test_nonsense_is_found_before_a_run(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    _env.check()
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=f"^{name}: found '{value}', wanted "):
        _env.check()


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _env.unknown()
    monkeypatch.setenv("AGMM_CACH", "off")
    monkeypatch.setenv("AGMM_KERNELS", "minimal")
    assert sorted({*_env.unknown()} - {*before}) == ["AGMM_CACH"]


def test_typo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.SHARED_GPUS.name, "yes")
    with pytest.raises(
        InvalidArgument, match=r"^AGMM_SHARED_GPUS: found 'yes', wanted 'on' or 'off'$"
    ):
        _env.is_on(_env.SHARED_GPUS)


@pytest.mark.parametrize(("value", "wanted"), [("", None), ("auto", None), ("0", 0), ("16", 16)])
def test_reserved_sms(monkeypatch: pytest.MonkeyPatch, value: str, wanted: int | None) -> None:
    monkeypatch.setenv(_env.RESERVED_SMS.name, value)
    assert _env.reserved_sms() == wanted


@pytest.mark.parametrize(
    ("seconds", "ms"), [("600", 600_000), ("0.0001", 1), ("1e300", 10**9), ("1e6", 10**9)]
)
def test_barriers_on_a_gpu_wait_no_longer_than_kernels(
    monkeypatch: pytest.MonkeyPatch, seconds: str, ms: int
) -> None:
    monkeypatch.setenv("AGMM_TIMEOUT_S", seconds)
    assert _env.timeout_ms() == ms
