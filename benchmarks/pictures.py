"""Draw every picture of the documentation but timelines, into one folder.

    python -m benchmarks.pictures docs/images

It needs no GPU. Timelines are recorded on GPUs by `agmm bench --timeline`: docs/measuring.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agmm.bench import plots, reports
from benchmarks import alone, architecture, predict_collectives

RESULTS = Path(__file__).parent / "results"
BENCH = ("nvidia-h200-x4", "scatter/nvidia-h200-x4", "all_reduce/nvidia-h200-x4")
"""The reports of `agmm bench` that are drawn."""
WAYS = (
    "roof",
    "unfused",
    "torch-decomposed-graph",
    "torch-native-graph",
    "torch-fused-graph",
    "agmm",
)
"""The ways that are drawn: one of each implementation. torch's are as CUDA graphs, since its
launches from Python take longer."""


def draw(folder: Path) -> list[Path]:
    """Draw the pictures into a folder and return their paths."""
    written = []
    for name in BENCH:
        report = reports.read(RESULTS / f"{name}.json")
        ways = [way for way in WAYS if way in report["shapes"][0]["ways"]]
        paths, left_out = plots.write(reports.narrow(report, None, ways), folder)
        assert not left_out
        written += paths
    gpus = ("nvidia-h100", "nvidia-h200")
    found = [json.loads((RESULTS / "alone" / f"{gpu}.json").read_text()) for gpu in gpus]
    written.append(folder / "matmul_alone-all_gather_matmul-nvidia-h100-h200-x1.png")
    alone.plot(found, written[-1])
    measured = json.loads((RESULTS / "collectives" / "nvidia-h200-x4.json").read_text())
    written.append(folder / "time-all_reduce-nvidia-h200-x4-x8.png")
    gpu = measured["machine"]["device_name"]
    predict_collectives.plot("all_reduce", [measured], [4, 8], gpu, written[-1])
    written.append(folder / architecture.NAME)
    architecture.draw(written[-1])
    return written


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write them.", file_okay=False)],
) -> None:
    """Draw the pictures of the documentation from the reports at hand."""
    for path in draw(folder):
        print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
