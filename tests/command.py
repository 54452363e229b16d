"""The command `agmm` in this process, which has imported what a new one takes seconds to import."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from unittest import mock

from agmm.__main__ import main


def agmm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `agmm ARGUMENTS` in this process; what needs one of its own, such as Ctrl-C, does not
    use it."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        mock.patch.object(sys, "argv", ["agmm", *arguments]),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(["agmm"], code, stdout.getvalue(), stderr.getvalue())
