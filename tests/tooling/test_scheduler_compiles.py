"""The public scheduler compiles with its default arguments, in a CUTLASS program of a user's."""

from __future__ import annotations

from pathlib import Path

import plain_gemm
import pytest

from agmm import _core


@pytest.mark.skipif(not _core.cuda_built, reason="agmm._core is built without CUDA")
@pytest.mark.skipif(plain_gemm.why_not() is not None, reason=str(plain_gemm.why_not()))
@pytest.mark.timeout(600)
def test_it_compiles(tmp_path: Path) -> None:
    library = plain_gemm.build(tmp_path)
    for schedule in plain_gemm.SCHEDULES:
        assert plain_gemm.function(library, schedule)
