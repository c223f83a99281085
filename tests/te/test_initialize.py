# SPDX-License-Identifier: Apache-2.0
"""create_te_backend: what it forwards, refuses, keeps, and how it leaves TE after a failure."""

from __future__ import annotations

import gc
import inspect
import logging
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fakes
import pytest
import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.base as base
import transformer_engine_torch as tex
from stock_te import FP8, NONE, Group, Stock, TwinGroup, create, use

from ub_dynamic.backends.te import build, initialize, install
from ub_dynamic.errors import UBAlignmentError, UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.manager import Manager


@pytest.fixture(autouse=True)
def _world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(tex, "CommOverlapHelper", lambda *groups: "helper")
    yield
    base.destroy_ub()


def test_the_real_signature_is_the_one_that_is_forwarded() -> None:
    parameters = list(inspect.signature(base.initialize_ub).parameters)
    ours = inspect.signature(initialize.create_te_backend).parameters
    renamed = {"capacity": "shape"}
    names = [renamed.get(name, name) for name in ours if name not in ("group", "board", "alternatives", "confirm")]
    assert names[:7] == parameters[:7]
    assert names[7:] == ["with_cublasmp"]
    assert parameters[7:] in ([], ["with_cublasmp"])  # since 2.17


def test_what_te_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = use(monkeypatch, Stock())
    backend = create(ub_cfgs={"qkv_fprop": {"aggregate": True}, "qkv_wgrad": None})
    assert stock.given == {
        "shape": [256, 64],
        "tp_size": 2,
        "use_fp8": False,
        "quantization_modes": [NONE],
        "dtype": torch.bfloat16,
        "ub_cfgs": [{"qkv_fprop": {"aggregate": True}}],  # a None of Megatron's presets is TE's default
        "bootstrap_backend": "gloo",  # never MPI, unless asked for
        "with_cublasmp": False,
    }
    assert len(backend.specs) == 10
    assert set(backend.skipped) == {"proj_wgrad", "fc2_wgrad"}
    assert backend.helper == "helper"
    assert tex.CommOverlapHelper("x") == "helper"  # the wrapper that kept it is gone
    backend.apply(64)
    assert {backend.active_tokens(name) for name in backend.specs} == {64}
    assert backend.active_tokens("proj_wgrad") == 256
    backend.destroy()


def test_tes_groups_do_not_wait_for_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch.distributed.new_group(backend=bootstrap_backend)" in inspect.getsource(base.initialize_ub)
    waits: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda backend=None, timeout=None: waits.append(timeout))

    stock = use(monkeypatch, Stock())
    stock.before = lambda: dist.new_group(backend="gloo")
    create().destroy()
    assert [wait.total_seconds() for wait in waits] == [300]
    dist.new_group(backend="gloo")
    assert waits[-1] is None


def test_explicit_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = use(monkeypatch, Stock())
    create(bootstrap_backend="mpi").destroy()
    assert stock.given["bootstrap_backend"] == "mpi"


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = use(monkeypatch, Stock())
    backend = create(use_fp8=True)
    assert stock.given["quantization_modes"] == [FP8]
    assert "qkv_fprop/fp8" in backend.specs
    backend.destroy()
    backend = create(quantization_modes=[FP8, NONE], ub_cfgs={"qkv_fprop": {}})
    assert stock.given["ub_cfgs"] == [{"qkv_fprop": {}}] * 2
    assert len(backend.specs) == 20
    backend.destroy()


def test_a_te_without_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Stock()

    def older(
        shape: Any, tp_size: int, use_fp8: bool = False, quantization_modes: Any = None, dtype: Any = None,
        ub_cfgs: Any = None, bootstrap_backend: Any = None,
    ) -> None:  # fmt: skip
        stock(shape, tp_size, use_fp8, quantization_modes, dtype, ub_cfgs, bootstrap_backend)

    monkeypatch.setattr(base, "initialize_ub", older)
    create().destroy()
    with pytest.raises(UBUnsupportedError, match="with_cublasmp came with Transformer Engine 2.17"):
        create(with_cublasmp=True)
    assert base._ub_communicators is None


@pytest.mark.parametrize("compiled", [True, False])
def test_communicators_of_te_before_2_17(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("get_tp_size", "with_cublasmp"):
        monkeypatch.delattr(tex.CommOverlapCore, method, raising=False)
    if not compiled:
        monkeypatch.setattr(initialize, "_load_native", lambda group: (None, "no compiler"))
    use(monkeypatch, Stock())
    backend = create()
    assert len(backend.specs) == (10 if compiled else 0)
    assert {comm.tp for comm in backend.communicators} == {2}
    backend.destroy()


ONE_BLOCK = {"num_splits": 1}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"quantization_modes": [NONE, NONE]}, UBShapeError, "names a mode twice"),
        ({"quantization_modes": [NONE, FP8], "ub_cfgs": [None]}, UBShapeError, "1 entries for 2"),
        ({"ub_cfgs": {"qkv": {}}}, UBShapeError, "unknown communicator 'qkv'"),
        ({"tp_size": 3}, UBShapeError, "does not divide the world of 2"),
        ({"capacity": (256, 72)}, UBShapeError, r"8 \* num_splits"),
        ({"ub_cfgs": {"fc1_dgrad": {"method": "pipeline"}}}, UBUnsupportedError, "fc1_dgrad.*silently wrong.*ring_e"),
        (
            {"use_fp8": True, "capacity": (34, 8), "ub_cfgs": {f"{name}_fprop": ONE_BLOCK for name in ("proj", "fc2")}},
            UBAlignmentError,
            r"capacity \[34, 8\]: qkv_dgrad .* multiple of 16 .*; the next valid capacity is \[36, 8\]",
        ),
        (
            {"ub_cfgs": {"qkv_wgrad": {"num_sm": 33}}},
            UBShapeError,
            r"qkv_wgrad \(bulk rs\): num_sm = 33, .* at most 32; .* 32$",
        ),
        (
            {"quantization_modes": [NONE, FP8], "ub_cfgs": {"qkv_dgrad": {"method": "ring_exchange"}}},
            UBUnsupportedError,
            "one quantization mode only",
        ),
    ],
)
def test_refused_before_te_is_called(
    changes: dict[str, Any], kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = use(monkeypatch, Stock())
    with pytest.raises(kind, match=text):
        create(**changes)
    assert stock.given == {}
    assert base._ub_communicators is None


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_pipelined_dgrad_needs_transposed_weights(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_engine.pytorch.utils.get_device_compute_capability", lambda: capability)
    stock = use(monkeypatch, Stock(qkv_dgrad="pipeline"))
    changes = {"use_fp8": True, "ub_cfgs": {"qkv_dgrad": {"method": "pipeline"}}}
    if capability < (10, 0):
        backend = create(**changes)
        assert backend.specs["qkv_dgrad/fp8"].method == "pipeline"
        backend.destroy()
    else:
        with pytest.raises(UBUnsupportedError, match="qkv_dgrad with a pipelined reduce-scatter"):
            create(**changes)
        assert stock.given == {}


def test_other_groups_than_tes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = use(monkeypatch, Stock())
    group = Group()
    group.members = (0, 2)
    with pytest.raises(UBUnsupportedError, match=r"contiguous ranks as TP group, here \[0, 1\], not \[0, 2\]"):
        create(group=group)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(UBStateError, match="init_process_group"):
        create()
    assert stock.given == {}


def test_initialised_by_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stock())
    monkeypatch.setattr(base, "_ub_communicators", {})
    with pytest.raises(UBStateError, match=r"call te\.destroy_ub"):
        create()
    assert base._ub_communicators == {}


def test_versions_and_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = use(monkeypatch, Stock())
    with monkeypatch.context() as patch:
        patch.setattr(initialize, "find_te", lambda: ("2.9.1", None))
        with pytest.raises(UBUnsupportedError, match=r"2\.9\.1 is older than 2\.10"):
            create()
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        with pytest.raises(UBUnsupportedError, match="ROCm"):
            create()
    assert stock.given == {}


def test_a_failure_half_way_leaves_te_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, Stock(RuntimeError("cudaIpcOpenMemHandle failed")))
    before = {id(obj) for obj in gc.get_objects() if isinstance(obj, (fakes.Base, fakes.Ring))}
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle failed") as caught:
        create()
    assert caught.value.__traceback__ is not None
    assert base._ub_communicators is None
    assert not getattr(base, "is_ub_initialized", bool)()  # since 2.17
    left = [obj for obj in gc.get_objects() if isinstance(obj, (fakes.Base, fakes.Ring)) and id(obj) not in before]
    assert not left, "the traceback keeps no communicator alive"
    assert not caplog.records
    use(monkeypatch, Stock())
    create().destroy()


@pytest.mark.parametrize("where", ["board", "log"])
def test_a_failure_at_the_end_leaves_te_as_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stock())
    board = SimpleNamespace(use_native=lambda native: None)

    def fail(*_: Any) -> None:
        raise RuntimeError("at the end")

    with monkeypatch.context() as patch:
        patch.setattr(*((board, "use_native") if where == "board" else (initialize, "_log")), fail)
        with pytest.raises(RuntimeError, match="at the end"):
            create(board=board)
    assert base._ub_communicators is None
    create().destroy()


def test_the_real_failure_of_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # TE's own function and classes, as far as they come here.
    with pytest.raises(Exception) as caught:
        create()
    assert not isinstance(caught.value, (UBStateError, AssertionError))
    assert base._ub_communicators is None
    with pytest.raises(type(caught.value)):
        create()


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_compiler_capacity_works_on_all_ranks(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, Stock())
    group = Group()
    if rank == 0:

        def missing() -> Any:
            raise UBUnsupportedError("install g++")

        monkeypatch.setattr(initialize.native_file, "load", missing)
    else:
        group.answer = "install g++"
    with caplog.at_level(logging.WARNING, "ub_dynamic"):
        backend = create(group=group)
    assert backend.specs == {}
    assert set(backend.skipped.values()) == {f"rank {rank}: install g++"}
    assert f"rank {rank}: install g++" in caplog.text
    manager = Manager(backend, (256, 64), check="never", guard=False)
    assert manager.round_up_tokens(64) == manager.max_tokens() == 256
    with pytest.raises(UBUnsupportedError, match=rf"T = 64.*stay at capacity \[256, 64\].*rank {rank}: install g\+\+"):
        manager.set_active_shape([64, 64])
    assert manager.set_active_shape([256, 64]).updated == ()
    assert backend.active_tokens("qkv_fprop") == 256
    backend.destroy()


def test_a_failed_self_test_keeps_capacity_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stock())

    def mismatch(*_: Any) -> None:
        raise UBUnsupportedError("the communicators of Transformer Engine 2.99 are not what this package knows")

    monkeypatch.setattr(initialize.native_file, "self_test", mismatch)
    backend = create()
    assert backend.specs == {}
    assert re.search(r"^rank 0: .*2\.99", backend.capacity_only)
    backend.destroy()


def test_destroy_ends_what_te_leaves_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stock())
    ended: list[Any] = []
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    backend = create()
    assert ended == []
    references = [comm.reference for comm in backend.communicators]
    assert all(isinstance(reference, weakref.ref) for reference in references)
    backend.destroy()
    assert ended == ["world", "domain"]
    assert backend.helper is None
    assert all(reference() is None for reference in references)
    backend.destroy()
    assert len(ended) == 2


def test_installed_over_tes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = use(monkeypatch, Stock())
    import ub_dynamic.api as api

    monkeypatch.setattr(api, "tensor_parallel_group", lambda *_: TwinGroup())
    api.install(check="never", guard=False)
    try:
        assert te.initialize_ub is not stock
        te.module.base.initialize_ub(shape=[256, 64], tp_size=2, quantization_modes=[NONE])
        assert api.is_ub_initialized()
        assert stock.given["shape"] == [256, 64]
        te.set_ub_active_shape([64, 64])
        assert api.get_ub_active_shape() == (64, 64)
        te.destroy_ub()
        assert not api.is_ub_initialized()
        assert base._ub_communicators is None
        te.destroy_ub()
    finally:
        api.uninstall()
    assert not install.is_installed()


def test_the_build_is_not_needed_for_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    version, package = build.find_te()
    assert version == te.__version__ if hasattr(te, "__version__") else version[0] == "2"
    assert (package / "pytorch").is_dir()
