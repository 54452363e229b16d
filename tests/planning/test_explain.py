"""What `agmm explain` says, with no GPU."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agmm.cli import explain, explanations, gpu_names
from agmm.cli.explanations import FEW, Explanation
from agmm.errors import InvalidArgument
from agmm.planning import built_kernels, card_rates, cost_model, formats, legality, tables
from agmm.planning.cost_model import collectives, gpu_constants
from agmm.planning.cost_model.cards import DriverFacts, of_facts
from agmm.planning.cost_model.collectives import Kind
from agmm.planning.op_plans import Choice
from agmm.planning.planner import Planner
from agmm.planning.plans import BY_TORCH, UNFUSED, Plan, Row
from agmm.planning.problems import CPU, KernelConfig, Problem
from agmm.planning.tables import Key

REPOSITORY = Path(__file__).resolve().parents[2]
GPU = "nvidia-h200"
PROBLEM = Problem(4096, 3576, 8192, world_size=4)  # in no packaged table


pytestmark = pytest.mark.usefixtures("default_kernels_assumed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AGMM_CACHE", raising=False)
    return tmp_path


def printed(found: Explanation, *, everything: bool = True) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(found.text(everything=everything), soft_wrap=True, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def said(problem: Problem) -> str:
    planner = explain.planner_for(problem.gpu, problem.world_size)
    return printed(explain.explain(problem, planner))


def choice_for(problem: Problem) -> Choice:
    """The planner's choice, which the cost model makes."""
    return explain.planner_for(problem.gpu, problem.world_size).choose(problem)


def test_by_the_cost_model() -> None:
    text, choice = said(PROBLEM), choice_for(PROBLEM)
    alone, us = cost_model.matmul_us(PROBLEM), choice.predicted_us
    assert us is not None and choice.plan.kernel is not None
    assert f"plan: {choice.plan.name}\n" in text
    assert "from: cost model" in text
    assert f"predicted: {us:.1f} µs, {us / alone:.2f} × the matmul alone ({alone:.1f} µs)" in text
    assert "measured: not yet" in text
    unfused = cost_model.unfused_us(PROBLEM)
    assert "why: fused, the unfused path" in text and f"to take {unfused:.1f} µs" in text
    assert text.count("(the plan)") == 1
    kernels = explain.kernels_for(GPU)(PROBLEM.op, PROBLEM.format)
    served = [kernel for kernel in kernels if legality.legal_splits(PROBLEM, kernel)]
    assert text.count("push, ") == 1 + len(served)


def test_a_few_alternatives_stand_beside_the_plan() -> None:
    found = explain.explain_any(PROBLEM, None)
    plans = len(found.alternatives)
    text, whole = printed(found, everything=False), printed(found)
    shown = [one.plan for one in found.alternatives if f" {one.plan}" in text.split("÷ plan")[1]]
    assert len(shown) == FEW + 1 and shown == [one.plan for one in found.alternatives[: FEW + 1]]
    assert f"{plans - FEW - 1} more plans: --all" in text and "--all" not in whole
    # The plan is printed however many are faster by the model.
    last = found.alternatives[-1]
    marked = [one._replace(mark=" (the plan)" if one == last else "") for one in found.alternatives]
    text = printed(replace(found, alternatives=tuple(marked)), everything=False)
    assert f"{last.plan} (the plan)" in text and f"{plans - FEW - 1} more" in text


def test_json_has_what_is_printed() -> None:
    found = explain.explain_any(PROBLEM, None)
    facts = json.loads(explanations.as_json([found.as_dict()]))[0]
    assert [facts[name] for name in ("op", "m", "n", "k", "ranks")] == [
        *("all_gather_matmul", 4096, 3576, 8192, 4),
    ]
    (chosen,) = [one for one in facts["alternatives"] if one["plan"] == facts["plan"]]
    assert chosen["chosen"] and chosen["predicted_us"] == facts["predicted_us"]
    assert facts["predicted_us"] > facts["matmul_alone_us"] > 0
    assert facts["plan_on_one_host"] is None
    odd = explain.explain_any(replace(PROBLEM, op="matmul_all_reduce", m=5), None).as_dict()
    assert odd["m"] == 5  # though the ranks compute some more
    many = explain.explain_any(replace(PROBLEM, world_size=16), None).as_dict()
    (chosen,) = [one["plan"] for one in many["alternatives"] if one["chosen"]]
    assert many["plan"].startswith("unfused") and many["plan_on_one_host"] == chosen


def test_links_without_atomics_take_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows = replace(PROBLEM, m=1024)
    assert "plan: sm" in said(few_rows)
    monkeypatch.setattr(explain, "has_atomics_here", lambda gpu: gpu != GPU)
    text = said(few_rows)
    assert "plan: push, " in text
    assert "sm16x" not in text
    assert (
        "note: links between the GPUs here have no native atomics, so SM push is not legal" in text
    )


def test_by_a_row(folder: Path) -> None:
    plan = Plan("push", KernelConfig.parse("128x192x64_2x1_cooperative/swizzle2/along_m"))
    tables.save(GPU, 4, [(Key.of(PROBLEM), Row(4096, plan, 351.0, 325.0, 520.0, "0.1.0"))])
    text = said(PROBLEM)
    assert f"plan: {plan.name}\n" in text
    assert f"from: {folder / 'nvidia-h200-x4.json'}" in text
    assert "measured: 351.0 µs, 1.08 × the matmul alone (325.0 µs), by agmm 0.1.0" in text
    assert "why: fused, the unfused path was measured at 520.0 µs" in text
    assert "(the plan)" not in text  # the table has the kernel in its usual order
    assert text.count("(the plan but for the order of tiles)") == 1
    assert f"tuned at M=4096 ({folder / 'nvidia-h200-x4.json'})" in said(replace(PROBLEM, m=5000))


def test_a_row_that_noise_has_kept(folder: Path) -> None:
    plan = Plan("push", KernelConfig.parse("128x192x64_2x1_cooperative/swizzle2/along_m"))
    tables.save(GPU, 4, [(Key.of(PROBLEM), Row(4096, plan, 351.0, 325.0, 345.0, "0.1.0"))])
    wanted = (
        "why: fused, the unfused path was measured at 345.0 µs, not faster by more than the noise"
    )
    assert wanted in said(PROBLEM)


def test_why_it_is_not_fused() -> None:
    few = replace(PROBLEM, m=16)
    text = said(few)
    assert re.search(r"why: agmm's gather, .*; [\d.]+ µs by NCCL's gather, [\d.]+ µs fused", text)
    many_ranks = replace(few, n=1024, world_size=16)  # more than a kernel's
    text = said(many_ranks)
    assert re.search(r"why: unfused is the fastest by cost model, [\d.]+ µs fused", text)
    tables.save(GPU, 4, [(Key.of(few), Row(16, UNFUSED, 43.0))])
    assert "why: unfused, it was measured to be the fastest" in said(few)
    text = said(replace(PROBLEM, k=8190))
    assert "why: unfused, the kernels cannot compute it: A_shard: found K=8190, wanted" in text
    assert "measured" not in text


@pytest.mark.parametrize(
    ("shape", "world_size"), [((4, 8, 8), 2), ((4, 14336, 4096), 4), ((64, 64, 64), 1)]
)
def test_no_ratio_where_the_model_has_no_ground(
    shape: tuple[int, int, int], world_size: int
) -> None:
    text = said(Problem(*shape, world_size=world_size))
    assert "× the matmul alone" not in text
    us = r"[\d.]+ µs"
    latency, as_long = (
        f"the matmul alone {us}, mostly latency",
        rf"as long as the matmul alone \({us}",
    )
    assert re.search(f"predicted: {us}, ({latency}|{as_long})", text)


def test_more_ranks_than_a_host_has_gpus() -> None:
    assert "ranks are more than" not in said(replace(PROBLEM, world_size=8))
    text = said(replace(PROBLEM, world_size=16))
    assert "plan: unfused, all-gather + matmul\n" in text
    assert "why: 16 ranks are more than the 8 GPUs of a host, and calls between hosts are" in text
    assert "note: on one host the plan would be push, " in text


def test_long_times_can_be_read() -> None:
    text = said(Problem(2**30, 2**27, 8192, world_size=4))
    assert re.search(r"predicted: [34]\d\.\d days", text)
    assert not re.search(r"\d{6}\.\d µs", text)


def test_one_rank() -> None:
    assert "why: fused, one rank has nothing to gather" in said(replace(PROBLEM, world_size=1))


def test_a_gpu_of_the_tables_without_constants() -> None:
    problem = replace(PROBLEM, gpu="nvidia-h999")
    tables.save("nvidia-h999", 2, [(Key.of(problem), Row(1, UNFUSED, 40.0))])
    assert gpu_names.find_gpu("H999") == "nvidia-h999"
    assert "no constants of nvidia-h999 are known, those of nvidia-h200 stand in" in said(problem)


def test_the_cpu() -> None:
    problem = Problem(10, 3, 5, format="float32", world_size=2, gpu=CPU)
    assert "from: default of the CPU backend" in said(problem)
    assert "predicted" not in said(problem)
    tables.save(CPU, 2, [(Key.of(problem), Row(10, Plan("push", chunks_per_shard=4), 5.0, 4.0))])
    text = said(problem)
    assert "plan: push, 4 chunks per shard" in text
    assert "measured: 5.0 µs, 1.25 × the matmul alone (4.0 µs)" in text


def test_rows_that_cannot_be_shared_out() -> None:
    with pytest.raises(InvalidArgument, match="m: found 4096, wanted a multiple of tp, 3"):
        said(replace(PROBLEM, world_size=3))


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "nvidia-h200"])
def test_gpu_names(name: str) -> None:
    assert gpu_names.find_gpu(name) == GPU


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h100", "nvidia-h100-80gb-hbm3"),
        ("H100 SXM", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("H100 PCIe", "nvidia-h100-pcie"),
        ("h20", "nvidia-h20"),
        ("h200 nvl", "nvidia-h200-nvl"),
        ("GH200", "nvidia-gh200-480gb"),
        ("CPU", "cpu"),
    ],
)
def test_names_of_other_gpus(name: str, gpu: str) -> None:
    assert gpu_names.find_gpu(name) == gpu


def test_a_gpu_with_a_table_comes_before_others() -> None:
    problem = replace(PROBLEM, gpu="nvidia-h200-nvl")
    tables.save("nvidia-h200-nvl", 2, [(Key.of(problem), Row(1, UNFUSED, 40.0))])
    assert gpu_names.find_gpu("nvl") == "nvidia-h200-nvl"


@pytest.mark.parametrize("name", ["", "v100", "nvidia-h2001", "h", "nvidia"])
def test_unknown_gpus(name: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"wanted one of cpu, .*, nvidia-h200, or, with .* nvidia-h100-pcie, "
    ):
        gpu_names.find_gpu(name)


@pytest.mark.parametrize(
    ("gpu", "changes", "plan", "why"),
    [
        ("a100", {}, "portable", "has 8.0"),
        ("l40s", {"op": "matmul_reduce_scatter"}, "portable", "has 8.9"),
        ("b200", {"op": "matmul_all_reduce"}, "portable", "has 10.0"),
        ("rtx-pro-6000", {"m": 512}, "unfused", "less than 1024 rows"),
        ("a100", {"world_size": 16}, "unfused", "more than the 8 GPUs"),
        ("a100", {"world_size": 1}, "the library's matmul", "nothing to send"),
    ],
)
def test_gpus_of_other_architectures(
    gpu: str, changes: dict[str, Any], plan: str, why: str
) -> None:
    text = said(replace(PROBLEM, gpu=gpu_names.find_gpu(gpu), **changes))
    assert f"plan: {plan}" in text
    assert why in text
    assert ("constants of NVIDIA's data sheet" in text) is (plan == "portable")
    assert ("predicted" in text) is (plan == "portable")


def test_a_card_without_a_data_sheet_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_names, "gpu_here", lambda: "nvidia-a40")
    monkeypatch.setattr(gpu_names, "capability_here", lambda: (8, 6))
    facts = DriverFacts("nvidia-a40", (8, 6), 84, 1740, 7251, 384, pcie_gb_per_s=31.5)
    monkeypatch.setattr(gpu_names, "card_here", lambda: of_facts(facts))
    monkeypatch.setattr(gpu_names, "gpus_here", lambda: ("NVIDIA A40",) * 4)
    text = said(replace(PROBLEM, gpu="nvidia-a40"))
    assert "plan: portable" in text
    assert "constants of its driver: 84 SMs at 1740 MHz" in text
    card_rates.save("nvidia-a40", (120.0, 600.0, None))
    assert "constants of one card, measured" in said(replace(PROBLEM, gpu="nvidia-a40"))


def test_the_gpu_here_may_be_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_names, "gpu_here", lambda: "nvidia-t4")
    monkeypatch.setattr(gpu_names, "capability_here", lambda: (7, 5))
    text = said(replace(PROBLEM, gpu="nvidia-t4"))
    assert "plan: unfused" in text
    assert "has 7.5, and agmm's copies want at least 8.0" in text


SCATTER = Problem(4096, 8192, 2304, world_size=4, op="matmul_reduce_scatter")
"""A problem of sizes that no packaged table has."""


def test_a_scatter_by_the_cost_model() -> None:
    text = said(SCATTER)
    assert "out[1024, 8192] = reduce_scatter(A[4096, 2304] @ B), bfloat16" in text
    assert f"plan: {choice_for(SCATTER).plan.name}\nfrom: cost model" in text
    assert "why: agmm's own, whose kernel sends tiles as they are computed" in text
    by_torch = cost_model.fused_matmul_reduce_scatter_us(SCATTER)
    assert f"{by_torch:.1f} µs by torch's fused op" in text


def test_a_scatter_that_no_kernel_can_compute() -> None:
    """The number of its columns is no multiple of 8."""
    text = said(replace(SCATTER, n=8188))
    assert "plan: torch\nfrom: cost model\npredicted: " in text
    assert re.search(r"why: torch's fused op, which saves more than the [\d.]+ µs that it", text)
    few = said(replace(SCATTER, n=8188, m=512))
    assert "plan: unfused\nfrom: cost model" in few
    assert re.search(r"why: unfused, torch's fused op saves nothing, wanted [\d.]+ µs", few)
    for each in (text, few):
        assert each.count("(the plan)") == 1 and "agmm tune" not in each and "128x" not in each


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": CPU}, ["plan: push\n", "from: default of the CPU", "why: agmm's own, each rank"]),
        (
            {"format": "float32"},
            ["plan: unfused\n", "why: unfused, A: dtype=float32, torch's fused"],
        ),
        ({"world_size": 1}, ["plan: unfused\n", "why: unfused, group: found 1 rank"]),
        ({"world_size": 16}, ["plan: unfused, matmul + reduce-scatter"]),
    ],
    ids=str,
)
def test_scatters_of_other_kinds(change: dict[str, Any], words: list[str]) -> None:
    text = said(replace(SCATTER, **change))
    assert all(word in text for word in words), text


def test_a_scatter_by_a_row(folder: Path) -> None:
    rows = [(Key.of(SCATTER), Row(4096, UNFUSED, 290.0, 180.0, 290.0, "0.2.0"))]
    tables.save(GPU, 4, [*rows, (Key.of(PROBLEM), Row(4096, UNFUSED, 1.0))])
    text = said(SCATTER)
    assert f"plan: unfused\nfrom: {folder}" in text
    assert "measured: 290.0 µs, 1.61 × the matmul alone (180.0 µs), by agmm 0.2.0" in text
    assert "why: it was measured to be the fastest" in text


def test_a_scatter_between_rows(folder: Path) -> None:
    kernel = KernelConfig.parse("128x128x64_1x1_pingpong/swizzle2/along_m")
    rows = [Row(m, Plan("push", kernel), m / 32, m / 64, m / 16, "0.2.0") for m in (4096, 8192)]
    tables.save(GPU, 4, [(Key.of(SCATTER), row) for row in rows])
    text = said(replace(SCATTER, m=6000))
    assert re.search(r"plan: push, \w+_pingpong/\S+\nfrom: tuned at M=4096 and", text)
    assert "why: it is the fastest by what was tuned at M=4096 and M=8192" in text
    assert "measured: not yet (agmm tune --op matmul_reduce_scatter does it)" in text
    assert ", 256.0 µs unfused" in said(SCATTER)
    assert "from: cost model\n" in said(replace(SCATTER, m=512))


def test_a_row_that_no_scatter_can_run_is_passed_over() -> None:
    kernel = KernelConfig.parse("256x128x64_2x1_cooperative")
    tables.save(GPU, 4, [(Key.of(SCATTER), Row(4096, Plan("push", kernel), 1.0))])
    with pytest.warns(UserWarning, match="agmm passes over rows of .*does not send tiles"):
        assert "plan: push, 128x" in said(SCATTER)


def test_a_scatter_returns_no_A() -> None:
    with pytest.raises(InvalidArgument, match="return_A: found True with matmul_reduce_scatter"):
        said(replace(SCATTER, return_A=True))


def test_fused_plan_of_a_scatter() -> None:
    planner = explain.planner_for(GPU, 4)
    assert planner.fused_plan(SCATTER).kernel is not None
    assert planner.fused_plan(replace(SCATTER, m=64, n=8188)) == BY_TORCH
    with pytest.raises(ValueError, match="found no fused one of matmul_reduce_scatter"):
        planner.fused_plan(replace(SCATTER, world_size=1))


@pytest.mark.parametrize(
    ("kind", "rows", "world_size", "plan", "why"),
    [
        ("all_reduce", 4, 8, "one_shot", "one_shot to 83 KiB, two_shot to 1.4 MiB, blocks to 16"),
        (
            "all_reduce",
            64,
            8,
            "two_shot",
            "one_shot to 83 KiB, two_shot to 1.4 MiB, blocks to 16",
        ),
        ("all_gather", 256, 4, "blocks", "one_shot to 1.5 MiB, blocks to 16 MiB, NCCL beyond"),
        ("reduce_scatter", 4096, 2, "NCCL", "one_shot to 1.5 MiB, blocks to 16 MiB, NCCL beyond"),
        ("all_reduce", 4, 9, "NCCL", "9 ranks, agmm's kernels serve at most 8"),
    ],
)
def test_collectives(kind: Kind, rows: int, world_size: int, plan: str, why: str) -> None:
    text = printed(explain.explain_collective(kind, rows, 8192, 2, world_size, GPU))
    assert f"plan: {plan}\n" in text and f"why: {why}" in text
    assert f" {plan} (the plan) " in text


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_limits_of_collectives_are_those_of_the_choice(world_size: int) -> None:
    limits = collectives.thresholds("all_reduce", world_size)
    for (method, most), (beyond, _) in pairwise(limits):
        assert collectives.collective_method("all_reduce", most, world_size) == method
        assert collectives.collective_method("all_reduce", most + 1024, world_size) == beyond


@pytest.mark.parametrize(
    ("rows", "columns", "gpu", "plan"),
    [
        (64, 8192, GPU, "two_shot, with residual and norm in the same kernel"),
        (4096, 8192, GPU, "NCCL, then an addition and torch's rms_norm"),
        (4, 32768, GPU, "one_shot, then an addition and torch's rms_norm"),  # rows of 64 KiB
        (4, 64, "cpu", "agmm, through shared memory, then an addition and torch's rms_norm"),
    ],
)
def test_all_reduces_with_a_norm(rows: int, columns: int, gpu: str, plan: str) -> None:
    said = explain.explain_norm(rows, columns, 2, 4, gpu)
    assert (said.plan, said.asked["op"]) == (plan, "all_reduce_rms_norm")
    assert f"all_reduce_rms_norm of [{rows}, {columns}]" in printed(said)


def said_of_all_reduce(problem: Problem, scaling: str | None = None) -> str:
    return printed(explain.explain_any(replace(problem, op="matmul_all_reduce"), scaling))


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (Problem(8192, 8192, 7168, world_size=4), "matmul + reduce-scatter in one kernel, then an"),
        (Problem(63, 8192, 2048, world_size=4), "matmul, then all-reduce"),
        (Problem(8192, 8190, 7168, world_size=4), "matmul, then all-reduce"),
        (Problem(8192, 8192, 7168, world_size=1), "matmul, then all-reduce"),
    ],
    ids=str,
)
def test_all_reduces(problem: Problem, plan: str) -> None:
    text = said_of_all_reduce(problem)
    assert f"out[{problem.m}, {problem.n}] = all_reduce(A[{problem.m}, {problem.k}] @ B)" in text
    assert f"plan: {plan}" in text
    assert text.count("(the plan)") == 1
    assert ("cannot compute it: B: found N=8190" in text) == (problem.n == 8190)
    assert ("(agmm tune --op matmul_all_reduce does it)" in text) == (problem.n != 8190)


def test_all_reduces_on_the_cpu_and_bad_input() -> None:
    on_cpu = said_of_all_reduce(Problem(63, 10, 20, world_size=4, gpu=CPU))
    assert "plan: agmm's own" in on_cpu and "measured" not in on_cpu
    problem = Problem(64, 64, 64, world_size=4)
    with pytest.raises(InvalidArgument, match="return_A: found True with matmul_all_reduce"):
        said_of_all_reduce(replace(problem, return_A=True))
    of_fp8 = replace(problem, format="float8_e4m3fn", gpu=CPU)
    assert "plan: agmm's own" in said_of_all_reduce(of_fp8, "block")


@pytest.mark.parametrize(
    ("rows", "scaling", "plan", "reason"),
    [
        (8192, "rowwise", "matmul + reduce-scatter in one kernel, then an", "predicted to save 3%"),
        (8192, "tensorwise", "matmul + reduce-scatter in one kernel, then an", "save 3%"),
        (64, "rowwise", "matmul, then all-reduce", "predicted to save 3%"),
        (8192, "block", "matmul + reduce-scatter in one kernel, then an", "save 3%"),
        (8192, "block 1x128", "matmul, then all-reduce", "this build has no kernel for it"),
    ],
)
def test_all_reduces_of_fp8(rows: int, scaling: str, plan: str, reason: str) -> None:
    """Kernels that scatter serve them; none sends finished tiles."""
    problem = Problem(rows, 8192, 7168, format="float8_e4m3fn", world_size=4)
    text = said_of_all_reduce(problem, scaling)
    assert f"plan: {plan}" in text and reason in text
    assert "one kernel to save" not in text and text.count("(the plan)") == 1


def test_predictions_of_collectives() -> None:
    """The predictions are those that docs/collectives-kernels.md has for 4 and 8 GPUs."""
    page = (Path(__file__).parents[2] / "docs" / "collectives-kernels.md").read_text()
    rows = re.findall(
        r"\| (\d+) ([KM])iB \| ([\d.]+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \| (\w+) \| ([\d.]+) \|",
        page,
    )
    assert len(rows) == 6
    for size, unit, *cells in rows:
        nbytes = int(size) << {"K": 10, "M": 20}[unit]
        for world_size, (us, method, library_us) in ((4, cells[:3]), (8, cells[3:])):
            found = collectives.by_kernel_us("all_reduce", nbytes, world_size)
            by_library = collectives.by_library_us("all_reduce", nbytes, world_size, GPU)
            assert (us, library_us) == (f"{found:.1f}", f"{by_library:.1f}")
            assert method == collectives.collective_method("all_reduce", nbytes, world_size)
            assert found < by_library


# --- fp8 ---


def said_of_fp8(problem: Problem, scaling: str | None) -> str:
    return printed(explain.explain_any(problem, scaling))


FP8_PROBLEM = replace(PROBLEM, format="float8_e4m3fn", n=3600)


def pretend_kernels(monkeypatch: pytest.MonkeyPatch, usual: str, *of_fp8: str) -> None:
    """A kernel of 16 bits, and some of fp8 that accumulate fast."""
    built = {"bfloat16": (usual,), "float8_e4m3fn_float8_e4m3fn fast": of_fp8}
    monkeypatch.setattr(
        built_kernels,
        "kernels_of",
        lambda op, name, *_: tuple(KernelConfig.parse(each) for each in built.get(name, ())),
    )


def test_fp8_with_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernels(monkeypatch, "128x256x64_2x1_cooperative", "128x256x128_2x1_cooperative")
    text = said_of_fp8(FP8_PROBLEM, None)
    assert "float8_e4m3fn with rowwise scales, B by column, 4 ranks on nvidia-h200" in text
    assert "plan: push, 128x256x128_2x1_cooperative/" in text
    assert "NCCL's all-gather and torch._scaled_mm" in text
    assert text.count("(the plan)") == 1


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("scaling", ["tensorwise", "block"])
def test_fp8_without_one(monkeypatch: pytest.MonkeyPatch, scaling: str, op: str) -> None:
    pretend_kernels(monkeypatch, "128x256x64_2x1_cooperative")
    text = said_of_fp8(replace(FP8_PROBLEM, op=op), scaling)
    assert f"float8_e4m3fn with {scaling} scales" in text
    assert "plan: unfused, " in text and "this build has no kernel for it" in text
    assert "no CUDA kernels" not in text


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block", "block 1x128"])
def test_fp8_without_cuda_is_that_of_a_default_build(scaling: str, op: str) -> None:
    """A GPU that `--gpu` names and that is not here is explained with the kernels of a default
    build, as it is with operands of 16 bits."""
    text = said_of_fp8(replace(FP8_PROBLEM, op=op), scaling)
    is_served = scaling != "block 1x128"
    assert ("plan: push, 128x" in text) is is_served
    assert ("this build has no kernel for it" in text) is not is_served
    assert "assumed are the default ones of nvidia-h200" in text
    assert text.count("(the plan)") == 1


def test_each_call_says_that_kernels_are_assumed() -> None:
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        text = printed(explain.explain_any(replace(PROBLEM, op=op), None))
        assert "assumed are the default ones of nvidia-h200" in text, op


def test_fp8_on_the_cpu_and_bad_input() -> None:
    assert "agmm's own on CPU ranks" in said_of_fp8(replace(FP8_PROBLEM, gpu=CPU), "block")
    for problem, scaling, message in (
        (FP8_PROBLEM, "row", "scaling: found 'row', wanted one of"),
        (replace(FP8_PROBLEM, k=24), None, "k: found 24, wanted a multiple of 16 with fp8"),
        (replace(FP8_PROBLEM, m=4098), None, "m: found 4098, wanted a multiple of tp, 4"),
        (PROBLEM, "rowwise", "scaling: found 'rowwise' with bfloat16, wanted none, or float8"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            said_of_fp8(problem, scaling)


def test_it_says_how_uncertain_the_model_is() -> None:
    shape = Problem(1000, 7168, 9216, world_size=2)
    before = cost_model.constants(shape.gpu)
    planner = Planner(cost_model.default_kernels)
    try:
        for known in (None, 0.09):
            of_op = {} if known is None else {"sm push": known, "push": known, "gather": known}
            changed = {"2": {formats.BITS_16: {"uncertainty": {shape.op: of_op}}}}
            gpu_constants.give(shape.gpu, replace(before, of_ranks=changed))
            found = explain.explain(shape, planner)
            assert found.uncertainty == found.as_dict()["uncertainty"] == known
            (line,) = [one for one in found.times if one.startswith("uncertainty: ")]
            assert ("9%" in line) if known else ("not known" in line)
    finally:
        gpu_constants.give(shape.gpu, before)
