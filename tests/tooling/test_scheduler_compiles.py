"""The public scheduler compiles with its default arguments, in a CUTLASS program of a user's: with
either schedule. `make test` compiles one, in examples/cpp."""

from __future__ import annotations

import compiles
import plain_gemm
import pytest

from agmm import _core


@pytest.mark.slow
@pytest.mark.skipif(not _core.cuda_built, reason="agmm._core is built without CUDA")
@pytest.mark.skipif(plain_gemm.why_not() is not None, reason=str(plain_gemm.why_not()))
@pytest.mark.timeout(600)
@pytest.mark.compiles.with_args(plain_gemm.build)
def test_it_compiles() -> None:
    library = compiles.result(plain_gemm.build)
    for schedule in plain_gemm.SCHEDULES:
        assert plain_gemm.function(library, schedule)
