# SPDX-License-Identifier: Apache-2.0
"""TE's names among others that call or replace them: stock communicators, early references, wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.base as base
import transformer_engine_torch as tex
from stock_te import NONE, Stock, TwinGroup, use

import ub_dynamic as ubd
from ub_dynamic import UBRankMismatchError, UBStateError, UBUnsupportedError, api
from ub_dynamic.backends.te import install
from ub_dynamic.groups import SoloGroup

CAPACITY = [256, 64]
TES_DESTROY = base.destroy_ub
PATHS = [te, te.module, base]


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(tex, "CommOverlapHelper", lambda *groups: "helper")
    monkeypatch.setattr(api, "tensor_parallel_group", lambda *_: TwinGroup())
    made = use(monkeypatch, Stock())
    gemm = tex.generic_gemm
    yield made
    ubd.destroy_ub()
    ubd.uninstall()
    TES_DESTROY()
    for path in PATHS:
        path.destroy_ub = TES_DESTROY
    assert tex.generic_gemm is gemm
    assert not hasattr(te, "set_ub_active_shape")


def initialize(function: Callable[..., Any] = ubd.initialize_ub, **more: Any) -> Any:
    own = {"backend": "te", "check": "never"} if function is ubd.initialize_ub else {}
    return function(CAPACITY, 2, quantization_modes=[NONE], **own, **more)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


def names() -> list[Any]:
    return [getattr(path, name) for path in PATHS for name in ("initialize_ub", "destroy_ub")]


class TestStockCommunicators:
    """Those that TE made without this package are TE's to destroy."""

    def test_install_over_them_leaves_a_way_out(self, stock: Stock) -> None:
        initialize(stock)
        ubd.install(check="never")
        with pytest.raises(UBStateError, match=r"not by this package: call te\.destroy_ub"):
            initialize(base.initialize_ub)
        ubd.destroy_ub()
        assert len(base._ub_communicators) == 12
        te.destroy_ub()
        assert base._ub_communicators is None
        initialize(base.initialize_ub)
        assert ubd.is_ub_initialized()

    def test_another_backend_does_not_take_their_end(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        initialize(stock)
        ubd.install()
        monkeypatch.setattr(api, "tensor_parallel_group", lambda *_: SoloGroup())
        manager = ubd.initialize_ub([64, 64], 1, backend="host", check="never")
        te.destroy_ub()
        assert base._ub_communicators is None
        assert api.manager() is manager

    def test_made_after_tes_own_destroy(self, stock: Stock) -> None:
        initialize()
        TES_DESTROY()  # a reference from before: nothing of this package hears of it
        initialize(stock)
        theirs = base._ub_communicators
        ubd.destroy_ub()
        assert base._ub_communicators is theirs
        assert len(theirs) == 12
        assert not ubd.is_ub_initialized()

    def test_no_shape_is_set_after_tes_own_destroy(self) -> None:
        initialize()
        TES_DESTROY()
        with pytest.raises(UBStateError, match="destroyed behind the registry's back: call destroy_ub"):
            ubd.set_ub_active_shape([64, 64])
        ubd.destroy_ub()
        initialize()

    def test_a_failed_start_gives_the_names_back(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("no manager")

        monkeypatch.setattr(api, "Manager", fail)
        before = names()
        with pytest.raises(RuntimeError, match="no manager"):
            initialize()
        assert base._ub_communicators is None
        assert names() == before


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "never installed"])
class TestTheEndWhileTheManagerLives:
    """te.destroy_ub ends the manager, whatever became of install()."""

    def start(self, installed: bool) -> list[Any]:
        before = names()
        if installed:
            ubd.install(check="never")
        initialize()
        if installed:
            assert ubd.uninstall() == []
            assert not install.is_installed()
        return before

    @pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
    def test_it_is_ended(self, installed: bool, path: Any) -> None:
        gemm = tex.generic_gemm
        before = self.start(installed)
        assert tex.generic_gemm is not gemm
        path.destroy_ub()
        assert not ubd.is_ub_initialized()
        assert tex.generic_gemm is gemm
        assert names() == before
        assert base._ub_communicators is None

    def test_what_stock_makes_then_is_left_alone(self, installed: bool) -> None:
        self.start(installed)
        te.destroy_ub()
        initialize(base.initialize_ub)
        theirs = base._ub_communicators
        ubd.destroy_ub()
        assert base._ub_communicators is theirs
        te.destroy_ub()
        assert base._ub_communicators is None

    def test_inside_a_microbatch_the_callers_error_comes_out(self, installed: bool) -> None:
        self.start(installed)

        def step() -> None:
            with ubd.microbatch(64):
                te.destroy_ub()
                raise ValueError("the caller's")

        with pytest.raises(ValueError, match="the caller's"):
            step()
        assert not ubd.is_ub_initialized()

    def test_installed_again_before_the_end(self, installed: bool) -> None:
        self.start(installed)
        ubd.install(check="never")
        te.destroy_ub()
        assert install.is_installed()
        assert te.destroy_ub is not TES_DESTROY
        initialize(base.initialize_ub)
        assert ubd.is_ub_initialized()
        te.destroy_ub()
        assert not ubd.is_ub_initialized()
        assert ubd.uninstall() == []


class TestWrappersOfOthers:
    @pytest.mark.parametrize("end", [ubd.uninstall, ubd.install], ids=["uninstall", "install"])
    def test_around_ours_and_kept(self, end: Callable[[], Any], stock: Stock) -> None:
        ubd.install(check="never")
        base.initialize_ub = wrapped(base.initialize_ub)
        base.destroy_ub = wrapped(base.destroy_ub)
        end()
        for _ in range(2):
            initialize()
            assert stock.given["shape"] == CAPACITY
            base.destroy_ub()
            assert not ubd.is_ub_initialized()
            assert base._ub_communicators is None

    def test_after_uninstall_they_reach_tes_own(self, stock: Stock) -> None:
        ubd.install()
        base.initialize_ub = wrapped(base.initialize_ub)
        left = ubd.uninstall()
        assert left == ["transformer_engine.pytorch.module.base.initialize_ub"]
        initialize(base.initialize_ub)
        assert len(base._ub_communicators) == 12
        assert not ubd.is_ub_initialized()

    def test_after_uninstall_and_install_they_reach_ours_once(
        self, stock: Stock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ubd.install()
        base.initialize_ub = wrapped(base.initialize_ub)
        ubd.uninstall()
        ubd.install(check="never")
        initialize(base.initialize_ub)
        assert ubd.is_ub_initialized()
        assert len(base._ub_communicators) == 12

    @pytest.mark.parametrize("ours", [False, True], ids=["ub", "te"])
    @pytest.mark.parametrize("modes", [{}, {"with_cublasmp": False}])
    def test_there_before_without_a_signature(
        self, ours: bool, modes: dict[str, Any], stock: Stock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(base, "initialize_ub", lambda *args, **kwargs: stock(*args, **kwargs))
        if ours:
            ubd.install(check="never")
            initialize(base.initialize_ub, bootstrap_backend="nccl", **modes)
        else:
            initialize(bootstrap_backend="nccl", **modes)
        assert stock.given["shape"] == CAPACITY
        assert stock.given["tp_size"] == 2
        assert stock.given["bootstrap_backend"] == "nccl"
        assert ubd.is_ub_initialized()

    def test_there_before_over_a_te_without_cublasmp(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        def older(
            shape: Any, tp_size: int, use_fp8: bool = False, quantization_modes: Any = None, dtype: Any = None,
            ub_cfgs: Any = None, bootstrap_backend: Any = None,
        ) -> None:  # fmt: skip
            stock(shape, tp_size, use_fp8, quantization_modes, dtype, ub_cfgs, bootstrap_backend)

        monkeypatch.setattr(base, "initialize_ub", lambda shape, *args, **kwargs: older(shape, *args, **kwargs))
        initialize()
        assert stock.given["quantization_modes"] == [NONE]

    @pytest.mark.parametrize(
        ("theirs", "text"),
        [
            (lambda *args: None, "shape"),
            (lambda shape, tp_size: None, "bootstrap_backend, dtype, quantization_modes, ub_cfgs"),
        ],
    )
    def test_one_that_would_lose_arguments_is_refused(
        self, theirs: Any, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(base, "initialize_ub", theirs)
        with pytest.raises(UBUnsupportedError, match=text):
            initialize()

    def test_wrong_arguments_through_one(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(base, "initialize_ub", lambda *args, **kwargs: stock(*args, **kwargs))
        ubd.install()
        with pytest.raises(TypeError, match="tp_size"):
            base.initialize_ub(CAPACITY)
        with pytest.raises(TypeError, match="no_such"):
            base.initialize_ub(CAPACITY, 2, no_such=1)


@pytest.mark.parametrize(("members", "right"), [([0, 1], True), ([0, 2], False), ([1, 0], False)])
def test_a_tp_group_of_other_ranks_than_tes_is_refused(
    members: list[int], right: bool, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: members)
    group = dist.ProcessGroup(0, 2)
    if right:
        initialize(tp_group=group)
        return
    with pytest.raises(UBUnsupportedError, match=rf"tp_group has the ranks \[{members[0]}, {members[1]}\].*\[0, 1\]"):
        initialize(tp_group=group)
    assert not ubd.is_ub_initialized()
    assert stock.given == {}


@pytest.mark.parametrize(("name", "value"), [("use_fp8", True), ("with_cublasmp", True), ("bootstrap_backend", "nccl")])
def test_ranks_with_other_arguments_of_tes_learn_it_before_anything_is_made(
    name: str, value: Any, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def allgather(self: TwinGroup, mine: Any, what: str) -> list[Any]:
        if what != "comparing the arguments of initialize_ub":
            return [mine, mine]
        told.append(mine[0])
        return [mine, (told[0], *mine[1:])]  # the other rank gave what this one gives the first time

    monkeypatch.setattr(TwinGroup, "allgather", allgather)
    ubd.initialize_ub(CAPACITY, 2, backend="te", check="never")
    ubd.destroy_ub()
    stock.given = {}
    with pytest.raises(UBRankMismatchError, match=rf"rank 0: .*{name} = {value!r}"):
        ubd.initialize_ub(CAPACITY, 2, backend="te", check="never", **{name: value})
    assert stock.given == {}


class TestInstallAgain:
    def test_it_changes_the_defaults_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[dict[str, Any]] = []
        ubd.install()
        before = names()
        monkeypatch.setattr(api, "initialize_ub", lambda shape, tp_size, **more: given.append(more))
        ubd.install(check="strict", guard=False)
        assert names() == before
        base.initialize_ub(CAPACITY, 2)
        assert {name: given[0][name] for name in ("check", "guard", "backend")} == {
            "check": "strict", "guard": False, "backend": "te",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("options", "kind", "text"),
        [
            ({"check": "nonsense"}, UBStateError, r'check = \'nonsense\': it is "deferred", "strict" or "never"'),
            ({"policy": 3}, UBUnsupportedError, 'policy = 3: it is None, "always"'),
            ({"policy": lambda gemm, tokens: None, "auto": True}, UBUnsupportedError, "auto"),
        ],
    )
    def test_bad_arguments_change_nothing(self, options: Any, kind: type[Exception], text: str) -> None:
        stock = names()
        with pytest.raises(kind, match=text):
            ubd.install(**options)
        assert names() == stock
        ubd.install()
        first = names()
        with pytest.raises(kind, match=text):
            ubd.install(**options)
        assert install.is_installed()
        assert names() == first

    @pytest.mark.parametrize("owner", [tex, te], ids=["transformer_engine_torch", "transformer_engine.pytorch"])
    def test_a_te_that_lacks_something_is_refused_whole(self, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        lacking = {"transformer_engine_torch": "CommOverlapP2P", "transformer_engine.pytorch": "module"}[owner.__name__]
        before = names()
        with monkeypatch.context() as patch:
            patch.delattr(owner, lacking)
            with pytest.raises(UBUnsupportedError, match=lacking):
                ubd.install()
        assert names() == before
        assert not install.is_installed()
