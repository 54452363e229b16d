"""agmm as the backend of torch's async TP: registration, and which calls it serves."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from steps_taken import noted
from torch._subclasses.fake_tensor import FakeTensorMode

from agmm.errors import AgmmError, Unsupported, forget_warnings
from agmm.integrations import async_tp, async_tp_kernels
from agmm.ops import gather, kept, plain_scatter, portable
from agmm.ops.gather import Gathered
from agmm.ops.pipeline import KERNEL, LIBRARY, Route
from agmm.ops.plain_gather import PlainGather
from agmm.ops.plain_scatter import PlainScatter
from agmm.planning import call_plans
from agmm.planning.plans import UNFUSED, Plan
from agmm.planning.problems import KernelConfig, Problem
from agmm.runtime import symmetric

OP = "symm_mem::fused_all_gather_matmul"
op: Callable[..., Any] = torch.ops.symm_mem.fused_all_gather_matmul


SCATTER = "symm_mem::fused_matmul_reduce_scatter"
scatter: Callable[..., Any] = torch.ops.symm_mem.fused_matmul_reduce_scatter


def registered() -> tuple[str, frozenset[str], str, str, str]:
    """All that torch knows of the ops' kernels."""
    impls = frozenset(key for key in torch.library._impls if key.startswith("symm_mem/"))
    dump, table = torch._C._dispatch_dump, torch._C._dispatch_dump_table
    return dump(OP), impls, table(OP), dump(SCATTER), table(SCATTER)


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    """Nothing warned or decided yet; the registration afterwards is the one before."""
    forget_warnings()
    before = registered()
    yield
    async_tp.disable()
    assert registered() == before


# --- registration ---


def test_import_overrides_nothing() -> None:
    script = f"""
import torch
import torch.distributed._symmetric_memory
dumps = torch._C._dispatch_dump, torch._C._dispatch_dump_table
ops = {OP!r}, {SCATTER!r}
before = [dump(op) for op in ops for dump in dumps], set(torch.library._impls)
import agmm
import agmm.async_tp
impls = {{key for key in torch.library._impls if key.startswith("symm_mem/")}}
assert [dump(op) for op in ops for dump in dumps] == before[0]
assert impls == {{key for key in before[1] if key.startswith("symm_mem/")}}
assert not agmm.async_tp.is_enabled()
agmm.async_tp.enable()  # with no warning, in a process where nothing was overridden before
assert dumps[0](ops[0]) != before[0][0] and dumps[0](ops[1]) != before[0][2]
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_enable_covers_cuda_and_cpu_and_disable_uncovers_them() -> None:
    before = registered()
    assert not async_tp.is_enabled()
    async_tp.enable()
    assert async_tp.is_enabled()
    during = registered()
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has(OP, "CPU") and has(OP, "CUDA")
    assert has(SCATTER, "CPU") and has(SCATTER, "CUDA")
    # torch's own stay below, and Meta as it was.
    for dump in (during[0], during[3]):
        kernels = [line.split(":")[0].split()[0] for line in dump.splitlines() if " :: " in line]
        assert [kernels.count(key) for key in ("CUDA", "CPU", "Meta")] == [2, 1, 1]
    assert before[0] != during[0]
    async_tp.disable()
    assert not async_tp.is_enabled()
    assert registered() == before


def test_agmms_own_scatter_takes_torchs_kernel_past_that_of_agmm() -> None:
    found: list[object] = [plain_scatter.kernel_of_torch]
    with async_tp.enable():
        found.append(plain_scatter.kernel_of_torch)
    found.append(plain_scatter.kernel_of_torch)
    assert [kernel is not None for kernel in found] == [False, True, False]


def test_enabling_and_disabling_twice() -> None:
    before = registered()
    async_tp.disable()
    assert registered() == before
    async_tp.enable()
    once = registered()
    async_tp.enable()
    assert registered() == once
    async_tp.disable()
    assert registered() == before
    async_tp.disable()
    assert registered() == before


def test_context_restores_what_was_there_before() -> None:
    with async_tp.enable():
        with async_tp.enable():
            assert async_tp.is_enabled()
        assert async_tp.is_enabled()
        with async_tp.enable():
            async_tp.disable()
        assert async_tp.is_enabled()
    assert not async_tp.is_enabled()
    async_tp.enable()
    with async_tp.enable():
        pass
    assert async_tp.is_enabled()


def test_context_ends_with_an_exception() -> None:
    before = registered()
    with pytest.raises(KeyError, match="mine"), async_tp.enable():
        raise KeyError("mine")
    assert registered() == before


def test_enable_is_for_all_threads() -> None:
    seen: list[bool] = []
    with async_tp.enable():
        thread = threading.Thread(target=lambda: seen.append(async_tp.is_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


@pytest.mark.parametrize("op", range(2))
@pytest.mark.parametrize(
    "schema", ["symm_mem::no_such_op(Tensor A) -> Tensor", f"{OP}(Tensor A, int another) -> Tensor"]
)
def test_torch_without_an_op(monkeypatch: pytest.MonkeyPatch, op: int, schema: str) -> None:
    before = registered()
    ops = list(async_tp.OPS)
    ops[op] = ops[op]._replace(schema=schema)
    monkeypatch.setattr(async_tp, "OPS", ops)
    with pytest.raises(AgmmError) as refused:
        async_tp.enable()
    message = str(refused.value)
    assert "\n" not in message
    assert torch.__version__ in message and f"wanted {schema}" in message
    assert not async_tp.is_enabled()
    assert registered() == before


def test_failed_registration_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = registered()
    real = torch.library.Library.impl

    def fail_on_cpu(self: Any, name: str, kernel: Any, key: str, **options: Any) -> None:
        if key == "CPU":
            raise RuntimeError("refused")
        real(self, name, kernel, key, **options)

    monkeypatch.setattr(torch.library.Library, "impl", fail_on_cpu)
    with pytest.raises(RuntimeError, match="refused"):
        async_tp.enable()
    assert not async_tp.is_enabled()
    assert registered() == before


def test_calls_reach_agmm_only_while_enabled(group: str) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    with async_tp.enable(), noted(PlainGather, "by_cpu") as fused:
        gathered, (out,) = op(A, [B], 0, group)
        assert op(A, [B], 0, group, return_A=False)[0] is None
        assert fused.call_count == 2
    torch.testing.assert_close(gathered, A)
    torch.testing.assert_close(out, A @ B)
    with pytest.raises(NotImplementedError, match="fused_all_gather_matmul"):
        op(A, [B], 0, group)


def test_torch_kernel_is_torchs_own(group: str) -> None:
    """CUDA's is the one that torch registered for CUDA; for CPU, where it has none, Meta's."""
    calls = []

    def fallback(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return None, [torch.zeros(1)]

    A, B = torch.randn(4, 8), torch.randn(8, 3)
    cuda = async_tp.torch_kernel(OP, "CUDA")
    # In torch's test mode its CUDA kernel calls this function, and its Meta kernel does not.
    with (
        symm_mem._test_mode(),
        mock.patch.object(symm_mem, "_fused_all_gather_matmul_fallback", fallback),
    ):
        found = cuda(A, [B], 0, group, return_A=False)
        other = async_tp.torch_kernel(OP, "CPU")(A, [B], 0, group, return_A=True)
    assert len(calls) == 1
    assert calls[0][1] == {"return_A": False}
    assert found[0] is None and torch.equal(found[1][0], torch.zeros(1))
    torch.testing.assert_close(other[1][0], A @ B)


def test_test_mode_of_torch_is_left_to_torch(group: str) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    torch_kernel = mock.Mock(return_value=(None, []))
    kernel = async_tp_kernels.gather_over(torch_kernel)
    with symm_mem._test_mode():
        kernel(A, [B], 0, group, return_A=False)
    torch_kernel.assert_called_once_with(A, [B], 0, group, return_A=False)


# --- which calls agmm serves, on CUDA tensors that are fake ---


class Case:
    """Arguments of a call: shapes and what is odd about them."""

    def __init__(
        self,
        *,
        shape: tuple[int, ...] = (4, 6, 64),
        gather_dim: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        weights: int = 1,
        n: int = 24,
        k: int | None = None,
        b_dtype: torch.dtype | None = None,
        b_stride: tuple[int, int] | None = None,
        b_dims: int = 2,
    ) -> None:
        self.gather_dim = gather_dim
        self.A_shard = torch.empty(shape, dtype=dtype, device="cuda:0")
        if 0 < gather_dim < len(shape):  # as the compiler pass stores it: nothing fake is copied
            size = shape[gather_dim], *shape[:gather_dim], *shape[gather_dim + 1 :]
            self.A_shard = self.A_shard.new_empty(size).movedim(0, gather_dim)
        k = shape[-1] if k is None else k
        size = (k, n) if b_dims == 2 else (k, n, 1)
        stride = b_stride or torch.empty(size, device="meta").stride()
        self.Bs = [
            torch.empty_strided(size, stride, dtype=b_dtype or dtype, device="cuda:0")
            for _ in range(weights)
        ]

    def why(self) -> str | None:
        """Why a call of this kind is left to torch; None: agmm serves it."""
        assert dist.group.WORLD is not None
        call = self.A_shard, self.Bs, self.gather_dim, dist.group.WORLD.group_name
        return why_left(async_tp_kernels.gather_over, call)


def refusal(call: Callable[..., Any], *given: Any) -> tuple[type[Exception], str] | None:
    try:
        call(*given)
    except Exception as error:
        return type(error), str(error)
    return None


def why_left(over: Callable[[Any], Any], call: tuple[Any, ...]) -> str | None:
    """Asked of agmm's kernel over one of torch's, which it calls or does not call."""
    torch_kernel = mock.Mock(return_value=(None, []))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        over(torch_kernel)(*call)
    said = [str(warning.message) for warning in caught]
    assert len(said) == torch_kernel.call_count
    return said[0].partition(" to torch: ")[2] if said else None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake CUDA tensors, and a device that runs the kernels."""
    monkeypatch.setattr(symmetric, "why_unfused", lambda *_: None)
    with FakeTensorMode():
        yield


@pytest.mark.usefixtures("group", "hopper")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shape": (1, 64)},
        {"shape": (7, 8), "n": 8},
        {"shape": (3, 5, 2, 64), "gather_dim": 2},
        {"gather_dim": 1, "weights": 3},
        {"shape": (0, 64)},
        {"dtype": torch.float16},
        {"b_stride": (1, 64)},
        {"b_stride": (1, 72)},
        {"b_stride": (32, 1)},
    ],
    ids=str,
)
def test_served(options: dict[str, Any], workspace: Workspace) -> None:
    assert Case(**options).why() is None


@pytest.mark.usefixtures("group", "hopper")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "found dtype float32"),
        ({"dtype": torch.float8_e4m3fn}, "found dtype torch.float8_e4m3fn"),
        ({"gather_dim": 2}, "gather_dim: 2 with 3 dimensions"),
        ({"gather_dim": 3}, "gather_dim: 3 with 3"),
        ({"gather_dim": -3}, "gather_dim: -3 with 3"),
        ({"shape": (64,)}, "gather_dim: 0 with 1"),
        ({"shape": (4, 60)}, "K=60"),
        ({"n": 20}, "N=20"),
        ({"weights": 0}, "empty list"),
        ({"k": 32}, "found K=32, wanted 64"),
        ({"b_dims": 3}, "found 3 dimensions"),
        ({"b_dtype": torch.float16}, "found dtype torch.float16"),
        ({"b_stride": (48, 2)}, "wanted row-major or column-major"),
        ({"b_stride": (1, 68)}, "leading dimension 68"),
    ],
    ids=str,
)
def test_left_to_torch(options: dict[str, Any], reason: str) -> None:
    why = Case(**options).why()
    assert why is not None and reason in why


@pytest.mark.usefixtures("group")
def test_other_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "why_unfused", lambda device, *_: f"{device} is no Hopper")
    with FakeTensorMode():
        assert Case().why() == "cuda:0 is no Hopper"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("is_hopper", [True, False])
def test_ranks_that_share_no_memory_are_not_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, is_hopper: bool
) -> None:
    """Neither where agmm has no kernel, nor where its kernel turns out to have no memory."""
    why = None if is_hopper else "no Hopper"
    monkeypatch.setattr(symmetric, "why_unfused", lambda *_: why)
    monkeypatch.setattr(portable, "shares_no_memory", lambda *_: True)
    apart = mock.Mock(side_effect=Unsupported("group: found ranks on 2 hosts, wanted one"))
    monkeypatch.setattr(PlainGather, "route", lambda *_: Route(KERNEL))
    if not is_hopper:
        monkeypatch.setattr(PlainGather, "route", lambda *_: Route(LIBRARY, why))
    monkeypatch.setattr(PlainGather, "prepare", apart)
    served = mock.Mock(side_effect=lambda *_: Gathered(torch.empty(0), None, []))
    monkeypatch.setattr(PlainGather, "by_library", served)
    torch_kernel = mock.Mock()
    assert dist.group.WORLD is not None
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case = Case()
        call = case.A_shard, case.Bs, case.gather_dim, dist.group.WORLD.group_name
        for _ in range(2):
            async_tp_kernels.gather_over(torch_kernel)(*call)
    said = [str(warning.message) for warning in caught]
    wanted = "group: found ranks on 2 hosts, wanted one" if is_hopper else why
    assert said == [f"agmm takes the unfused path: {wanted}"]
    assert (served.call_count, torch_kernel.call_count) == (2, 0)


@pytest.mark.usefixtures("hopper")
def test_fake_groups_are_left_to_torch() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        assert "fake" in str(Case().why())
    finally:
        dist.destroy_process_group()


# --- what becomes of a call ---


class Workspace:
    """Stands for the CUDA workspace of 3 ranks: counts, and fails where it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[weakref.ref[Any]] = []
        self.shards: list[torch.Tensor] = []

    @property
    def prepared(self) -> int:
        return len(self.calls)

    def alive(self) -> list[Any]:
        """The prepared calls that somebody keeps."""
        gc.collect()
        return [call for made in self.calls if (call := made()) is not None]

    def ready(self, made: PlainGather) -> Any:
        shape = (3 * made.A_shard.shape[0], *made.A_shard.shape[1:])
        return_A = made.settings.return_A

        def call(shard: torch.Tensor, Bs: list[torch.Tensor], biases: Any) -> Gathered:
            assert len(biases) == len(Bs) and not any(biases)
            self.shards.append(shard)
            if self.error is not None:
                raise self.error
            A = shard.new_empty(shape) if return_A else None
            return Gathered(A, None, [shard.new_empty(*shape[:-1], B.shape[1]) for B in Bs])

        self.calls.append(weakref.ref(call))
        return call


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = Workspace()
    monkeypatch.setattr(gather, "cuda_workspace", lambda group, device: made)
    monkeypatch.setattr(PlainGather, "ready_on_cuda", lambda call, *_: made.ready(call))
    monkeypatch.setattr(PlainGather, "problem", lambda *_: Problem(4, 8, 64))
    planner = mock.Mock(plan=lambda problem: PLAN, fused_plan=lambda problem: PLAN, learns=False)
    monkeypatch.setattr(call_plans, "planner", lambda *_: planner)
    return made


PLAN = Plan("push", KernelConfig.parse("128x128x64_1x1_pingpong"))


@pytest.mark.usefixtures("hopper")
def test_plan_that_prefers_unfused(
    group: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    A = torch.empty(0)
    unfused = mock.Mock(
        side_effect=lambda call, words: Gathered(
            A if call.settings.return_A else None, None, list(call.Bs)
        )
    )
    monkeypatch.setattr(PlainGather, "by_library", lambda *given: unfused(*given))
    planner = mock.Mock(plan=lambda problem: UNFUSED, learns=False)
    monkeypatch.setattr(call_plans, "planner", lambda *_: planner)
    torch_kernel = mock.Mock()
    kernel = async_tp_kernels.gather_over(torch_kernel)
    A_shard = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda:0")
    B = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda:0").t()
    for _ in range(2):
        assert kernel(A_shard, [B], 0, group, return_A=True)[0] is A
        assert kernel(A_shard, [B], 0, group, return_A=False)[0] is None
    assert unfused.call_count == 4
    assert workspace.prepared == 0
    torch_kernel.assert_not_called()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("return_A", [False, True])
@pytest.mark.parametrize("gather_dim", [0, 1, 2])
def test_gather_dim_is_moved_and_moved_back(
    group: str, workspace: Workspace, gather_dim: int, return_A: bool
) -> None:
    torch_kernel = mock.Mock()
    kernel = async_tp_kernels.gather_over(torch_kernel)
    shape = (2, 3, 5, 64)
    # The layout in which the compiler pass gives the shard.
    order = [gather_dim, *(d for d in range(4) if d != gather_dim)]
    stored = torch.empty([shape[d] for d in order], dtype=torch.bfloat16, device="cuda:0")
    A_shard = stored.movedim(0, gather_dim)
    assert A_shard.shape == shape
    Bs = [torch.empty(n, 64, dtype=torch.bfloat16, device="cuda:0").t() for n in (8, 24)]
    A, outs = kernel(A_shard, Bs, gather_dim, group, return_A=return_A)
    assert workspace.shards[0].shape == stored.shape
    assert workspace.shards[0].untyped_storage()._cdata == stored.untyped_storage()._cdata
    gathered = list(shape)
    gathered[gather_dim] *= 3
    for found, columns in [*zip(outs, (8, 24), strict=True), *([(A, 64)] if return_A else [])]:
        assert found is not None
        assert list(found.shape) == [*gathered[:-1], columns]
        assert found.movedim(gather_dim, 0).is_contiguous()
    assert (A is None) == (not return_A)
    torch_kernel.assert_not_called()


@pytest.mark.usefixtures("hopper")
def test_decided_once_for_each_kind(group: str, workspace: Workspace) -> None:
    torch_kernel = mock.Mock(return_value=(None, []))
    kernel = async_tp_kernels.gather_over(torch_kernel)
    for _ in range(3):
        case = Case()
        kernel(case.A_shard, case.Bs, 0, group)
    assert (workspace.prepared, len(workspace.shards)) == (1, 3)
    kernel(case.A_shard, case.Bs, 0, group, return_A=False)
    kernel(case.A_shard.movedim(0, 1), case.Bs, 1, group)
    kernel(case.A_shard, case.Bs * 2, 0, group)
    assert workspace.prepared == 3  # along another dimension the rows are the same
    case = Case(dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"to torch: A_shard: found dtype float32"):
        kernel(case.A_shard, case.Bs, 0, group)
    kernel(case.A_shard, case.Bs, 0, group)
    assert (workspace.prepared, torch_kernel.call_count) == (3, 2)


@pytest.mark.usefixtures("hopper")
def test_workspace_that_cannot_be_had(group: str, workspace: Workspace) -> None:
    """For example ranks on two hosts, which shows only when the workspace is made."""
    workspace.error = Unsupported("group: found ranks on 2 hosts, wanted one")
    answer = None, [torch.empty(0)]
    torch_kernel = mock.Mock(return_value=answer)
    kernel = async_tp_kernels.gather_over(torch_kernel)
    case = Case()
    with pytest.warns(UserWarning, match="2 hosts"):
        found = kernel(case.A_shard, case.Bs, 0, group, return_A=False)
    assert found is answer
    assert kernel(case.A_shard, case.Bs, 0, group, return_A=False) is answer
    assert len(workspace.shards) == 1
    torch_kernel.assert_called_with(case.A_shard, case.Bs, 0, group, return_A=False)


@pytest.mark.usefixtures("hopper")
def test_number_of_kept_decisions_is_limited(
    group: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was prepared for a call ends when too many others have come after it."""
    monkeypatch.setattr(async_tp_kernels, "MAX_ROUTES", 4)
    monkeypatch.setattr(kept, "MAX_KEPT", 4)
    kernel = async_tp_kernels.gather_over(mock.Mock())
    for rows in range(1, 12):
        case = Case(shape=(rows, 64))
        kernel(case.A_shard, case.Bs, 0, group)
    assert len(workspace.alive()) <= 4


@pytest.mark.usefixtures("hopper")
def test_decisions_end_with_their_group(workspace: Workspace) -> None:
    """A name may come back for another group."""
    kernel = async_tp_kernels.gather_over(mock.Mock())
    for made in (1, 2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            case = Case()
            assert dist.group.WORLD is not None
            for _ in range(2):
                kernel(case.A_shard, case.Bs, 0, dist.group.WORLD.group_name)
            assert workspace.prepared == made
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize(
    "arguments",
    [
        lambda A, B: (A, [B], 7),
        lambda A, B: (A, [B[:5]], 0),
        lambda A, B: (A, [B.double()], 0),
        lambda A, B: (A[0], [B], 0),
    ],
    ids=["gather_dim", "K", "dtype", "dimensions"],
)
@pytest.mark.filterwarnings("ignore:agmm leaves")
def test_bad_input_is_refused_as_torch_refuses_it(
    group: str, arguments: Callable[..., tuple[Any, ...]]
) -> None:
    given = arguments(torch.randn(4, 8), torch.randn(8, 3))

    with async_tp.enable():
        found = refusal(op, *given, group)
    assert found == refusal(symm_mem._fused_all_gather_matmul_fallback, *given, group)


def test_unknown_group_is_refused_as_torch_refuses_it(group: str) -> None:
    with async_tp.enable(), pytest.raises(RuntimeError, match="no such group"):
        op(torch.randn(4, 8), [torch.randn(8, 3)], 0, "no such group")


def test_warning_points_at_the_caller(group: str) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    with async_tp.enable(), pytest.warns(UserWarning, match="agmm leaves") as caught:
        op(A, [B], 1, group)
    assert [warning.filename for warning in caught] == [__file__]


# --- fused_matmul_reduce_scatter ---


def why(shape: tuple[int, ...] = (4, 6, 8), **options: Any) -> str | None:
    given: dict[str, Any] = {"reduce_op": "sum", "scatter_dim": 0, "dtype": torch.float32}
    given |= {"n": 5, "k": shape[-1], "device": "cpu"} | options
    A = torch.empty(shape, dtype=given["dtype"], device=given["device"])
    B = torch.empty(given["k"], given["n"], dtype=given["dtype"], device=given["device"])
    assert dist.group.WORLD is not None
    call = A, B, given["reduce_op"], given["scatter_dim"], dist.group.WORLD.group_name
    return why_left(async_tp_kernels.scatter_over, call)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shape": (4, 8)},
        {"reduce_op": "avg"},
        {"scatter_dim": 1},
        {"dtype": torch.bfloat16},
        {"k": 0, "shape": (4, 0)},
        {"n": 0},
        {"shape": (0, 8)},
    ],
    ids=str,
)
def test_scatters_that_agmm_serves(options: dict[str, Any]) -> None:
    assert why(**options) is None


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scatter_dim": 2}, "scatter_dim: 2 with 3 dimensions"),
        ({"scatter_dim": -3}, "scatter_dim: -3 with 3"),
        ({"shape": (8,)}, "scatter_dim: 0 with 1"),
        ({"reduce_op": "max"}, "reduce_op: found 'max'"),
        ({"dtype": torch.int32}, "dtype=torch.int32"),
        ({"k": 7}, "found K=7, wanted 8"),
        ({"device": "meta"}, "device meta"),
    ],
    ids=str,
)
def test_scatters_that_are_left_to_torch(options: dict[str, Any], reason: str) -> None:
    said = why(**options)
    assert said is not None and reason in said


def test_scatters_reach_agmm_only_while_enabled(group: str) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    with async_tp.enable(), noted(PlainScatter, "by_cpu") as calls:
        out = scatter(A, B, "sum", 0, group)
        assert scatter(A.unsqueeze(0), B, "avg", 1, group).shape == (1, 4, 3)
        assert calls.call_count == 2
    torch.testing.assert_close(out, A @ B)
    with pytest.raises(NotImplementedError, match="fused_matmul_reduce_scatter"):
        scatter(A, B, "sum", 0, group)


def test_scatter_that_agmm_leaves_is_torchs_and_said_once(group: str) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    with async_tp.enable():
        with pytest.warns(UserWarning, match="leaves symm_mem.fused_matmul_reduce_scatter") as said:
            out = scatter(A, B, "sum", 1, group)
        assert [warning.filename for warning in said] == [__file__]
        again = scatter(A, B, "sum", 1, group)
    torch.testing.assert_close(out, A @ B)
    assert torch.equal(out, again)


def test_test_mode_leaves_scatters_to_torch(group: str) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    torch_kernel = mock.Mock(return_value=A)
    with symm_mem._test_mode():
        assert async_tp_kernels.scatter_over(torch_kernel)(A, B, "sum", 0, group) is A
    torch_kernel.assert_called_once_with(A, B, "sum", 0, group)


def test_scatter_of_a_workspace_that_cannot_be_had(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = torch.randn(4, 8), torch.randn(8, 3)
    refused = mock.Mock(side_effect=Unsupported("group: found ranks on 2 hosts, wanted one"))
    monkeypatch.setattr(PlainScatter, "by_cpu", refused)
    torch_kernel = mock.Mock(return_value=A)
    kernel = async_tp_kernels.scatter_over(torch_kernel)
    with pytest.warns(UserWarning, match="2 hosts"):
        assert kernel(A, B, "sum", 0, group) is A
    assert kernel(A, B, "sum", 0, group) is A
    assert refused.call_count == 1 and torch_kernel.call_count == 2


@pytest.mark.parametrize(
    "arguments",
    [
        lambda A, B: (A, B, "sum", 7),
        lambda A, B: (A, B, "no such", 0),
        lambda A, B: (A, B[:5], "sum", 0),
        lambda A, B: (A, B.double(), "sum", 0),
    ],
    ids=["scatter_dim", "reduce_op", "K", "dtype"],
)
@pytest.mark.filterwarnings("ignore:agmm leaves")
def test_bad_scatters_are_refused_as_torch_refuses_them(
    group: str, arguments: Callable[..., tuple[Any, ...]]
) -> None:
    given = arguments(torch.randn(4, 8), torch.randn(8, 3))

    with async_tp.enable():
        found = refusal(scatter, *given, group)
    assert found is not None
    assert found == refusal(symm_mem._fused_matmul_reduce_scatter_fallback, *given, group)
