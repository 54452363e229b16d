"""Predictions for cards that agmm has no matmul kernels for, from data sheets and drivers."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from agmm.planning import card_rates
from agmm.planning.cost_model import cards
from agmm.planning.cost_model.cards import CARDS, DriverFacts, of_facts
from agmm.planning.problems import (
    ALL_GATHER_MATMUL,
    MATMUL_ALL_REDUCE,
    MATMUL_REDUCE_SCATTER,
    Problem,
)

A100 = CARDS["nvidia-a100-sxm4-80gb"]
PROBLEM = Problem(8192, 8192, 8192, world_size=8, op=ALL_GATHER_MATMUL, gpu=A100.name)
FACTS = {
    "nvidia-a100-sxm4-80gb": DriverFacts("A100", (8, 0), 108, 1410, 1593, 5120, nvlinks=12),
    "nvidia-a100-pcie-40gb": DriverFacts("A100", (8, 0), 108, 1410, 1215, 5120, pcie_gb_per_s=31.5),
    "nvidia-l40s": DriverFacts("L40S", (8, 9), 142, 2520, 9001, 384, pcie_gb_per_s=31.5),
    "nvidia-b200": DriverFacts("B200", (10, 0), 148, 1850, 3996, 8192, nvlinks=18),
    "nvidia-rtx-pro-6000-blackwell-server-edition": DriverFacts(
        "RTX PRO 6000", (12, 0), 188, 2617, 12481, 512, pcie_gb_per_s=63.0
    ),
    "nvidia-rtx-pro-6000-blackwell-workstation-edition": DriverFacts(
        "RTX PRO 6000", (12, 0), 188, 2617, 14001, 512, pcie_gb_per_s=63.0
    ),
}
"""What drivers say of cards whose data sheets are known: clocks and widths of the cards."""


@pytest.mark.parametrize("name", FACTS)
def test_drivers_say_what_data_sheets_say(name: str) -> None:
    found, wanted = of_facts(FACTS[name]), CARDS[name]
    for rate in ("tflops", "fp8_tflops", "memory_gb_per_s", "link_gb_per_s"):
        assert getattr(found, rate) == pytest.approx(getattr(wanted, rate), rel=0.05), rate


@pytest.mark.parametrize("op", [ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE])
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_the_path_hides_what_it_can(card: cards.Card, op: str) -> None:
    """It takes no less than the products or the copies, and no longer than both and its pieces."""
    for size in (2, 8):
        problem = replace(PROBLEM, op=op, world_size=size)
        by_copies, unfused = cards.portable_us(card, problem), cards.unfused_us(card, problem)
        alone = card.matmul_us(problem.m, problem.n, problem.k)
        assert by_copies > alone
        assert by_copies < 1.1 * unfused
        if op == ALL_GATHER_MATMUL and card.link_gb_per_s >= 300:
            assert by_copies < 0.95 * unfused


def test_a_slow_network_decides_between_hosts() -> None:
    problem = replace(PROBLEM, m=16384, world_size=16)
    times = [cards.between_hosts_us(A100, problem, 2, rate) for rate in (12.5, 50.0, 1e6)]
    assert times == sorted(times, reverse=True)
    for rate in (12.5, 50.0):
        unfused = cards.unfused_between_hosts_us(A100, problem, 2, rate)
        assert cards.between_hosts_us(A100, problem, 2, rate) < unfused


def test_the_page_on_several_hosts_has_the_predictions() -> None:
    repository = Path(__file__).resolve().parents[2]
    rows = list(runpy.run_path(str(repository / "benchmarks/predict_hosts.py"))["rows"]())
    page = (repository / "docs/howto/several-hosts.md").read_text()
    assert len(rows) > 10 and [row for row in rows if row not in page] == []


@pytest.mark.parametrize("op", [ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MATMUL_ALL_REDUCE])
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 2), (3, 3), (8, 2), (16, 2), (12, 3)])
def test_messages_hide_no_more_than_there_is(op: str, ranks: int, hosts: int) -> None:
    problem = replace(PROBLEM, m=16384 * ranks, op=op, world_size=ranks)
    alone = A100.matmul_us(problem.m, problem.n, problem.k)
    found = cards.between_hosts_us(A100, problem, hosts, 50.0)
    assert alone < found < 1.1 * cards.unfused_between_hosts_us(A100, problem, hosts, 50.0)


def test_measured_rates_take_the_place_of_peaks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path))
    assert card_rates.read(A100.name) is None
    path = card_rates.save(A100.name, (200.0, 1500.0, None))
    assert path is not None
    rates = card_rates.read(A100.name)
    assert rates == (200.0, 1500.0, None)
    card = cards.with_measured(A100, *rates)
    assert card.matmul_us(8192, 8192, 8192) == pytest.approx(5 + 2e-6 * 8192**3 / 200, rel=1e-6)
    assert card.link_gb_per_s == A100.link_gb_per_s
    path.write_text("{}")
    assert card_rates.read(A100.name) is None
    monkeypatch.setenv("AGMM_CACHE", "off")
    assert card_rates.save(A100.name, rates) is None
