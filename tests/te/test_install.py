# SPDX-License-Identifier: Apache-2.0
"""install() and uninstall(): every path to TE's names, signatures as TE has them, and no trace afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import fakes
import pytest
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from ub_dynamic.backends.te import install
from ub_dynamic.backends.te.patches import Patches
from ub_dynamic.errors import UBUnsupportedError

OWNERS = (te, te.module, te.module.base)
KINDS = (tex.CommOverlap, tex.CommOverlapP2P)
METHODS = ("set_buffer_active_shape", "get_buffer_active_shape", "get_buffer_capacity_shape")


class Ours:
    """The functions that install() puts behind TE's names; each call is recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def initialize_ub(
        self, shape: Any, tp_size: int, use_fp8: bool = False, quantization_modes: Any = None, dtype: Any = None,
        ub_cfgs: Any = None, bootstrap_backend: Any = None, with_cublasmp: bool = False, *, check: str = "deferred",
        auto: bool = False,
    ) -> str:  # fmt: skip
        given = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(("initialize_ub", given))
        return "a manager, which TE's function does not return"

    def destroy_ub(self) -> None:
        self.calls.append(("destroy_ub",))

    def set_ub_active_shape(self, shape: Any) -> None:
        self.calls.append(("set_ub_active_shape", shape))

    def set_buffer_active_shape(self, comm: Any, shape: Any) -> None:
        self.calls.append(("set_buffer_active_shape", comm, shape))

    def get_buffer_active_shape(self, comm: Any) -> tuple[int, int]:
        return (1, 2)

    def get_buffer_capacity_shape(self, comm: Any) -> tuple[int, int]:
        return (3, 4)

    def install(self) -> None:
        names = ("initialize_ub", "destroy_ub", "set_ub_active_shape", *METHODS)
        install.install(**{name: getattr(self, name) for name in names})


@pytest.fixture
def ours() -> Iterator[Ours]:
    made = Ours()
    made.install()
    yield made
    install.uninstall()


def everything() -> dict[Any, dict[str, Any]]:
    """All attributes of all that install() may touch."""
    return {owner: dict(vars(owner)) for owner in (*OWNERS, *KINDS, tex)}


def test_no_trace_is_left() -> None:
    before = everything()
    made = Ours()
    for _ in range(2):
        made.install()
        made.install()
        assert install.is_installed()
        assert everything() != before
        assert install.uninstall() == []
        assert not install.is_installed()
        assert everything() == before
    assert install.uninstall() == []


def test_every_path_reaches_ours(ours: Ours) -> None:
    for owner in OWNERS:
        assert owner.initialize_ub([64, 32], 2) is None
        owner.destroy_ub()
    names = [name for name, *_ in ours.calls]
    assert names == ["initialize_ub", "destroy_ub"] * 3


def test_the_signature_is_tes(ours: Ours) -> None:
    stock = install.stock("initialize_ub")
    for owner in OWNERS:
        assert inspect.signature(owner.initialize_ub) == inspect.signature(stock)
        assert owner.initialize_ub.__doc__ == stock.__doc__
        assert inspect.signature(owner.destroy_ub) == inspect.signature(install.stock("destroy_ub"))
    assert stock.__module__ == "transformer_engine.pytorch.module.base"
    assert not hasattr(stock, "__wrapped__")


def test_arguments_arrive_by_name(ours: Ours) -> None:
    modes = [fakes.MODES.FP8, fakes.MODES.NONE]
    te.initialize_ub([64, 32], 2, False, modes, ub_cfgs={"qkv_fprop": {}}, bootstrap_backend="nccl", auto=True)
    ((_, given),) = ours.calls
    assert given["shape"] == [64, 32]
    assert given["quantization_modes"] is modes
    assert given["ub_cfgs"] == {"qkv_fprop": {}}
    assert given["bootstrap_backend"] == "nccl"
    assert given["auto"] is True
    assert given["check"] == "deferred"


def test_wrong_arguments_get_tes_error(ours: Ours) -> None:
    with pytest.raises(TypeError, match="tp_size"):
        te.initialize_ub([64, 32])
    with pytest.raises(TypeError, match="no_such"):
        te.initialize_ub([64, 32], 2, no_such=1)
    assert ours.calls == []


def test_an_argument_of_a_later_te(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize_ub(shape: Any, tp_size: int, from_the_future: bool = False) -> None:
        raise AssertionError("not called")

    for owner in OWNERS:
        monkeypatch.setattr(owner, "initialize_ub", initialize_ub)
    made = Ours()
    made.install()
    try:
        te.initialize_ub([64, 32], 2)
        with pytest.raises(UBUnsupportedError, match="from_the_future"):
            te.initialize_ub([64, 32], 2, from_the_future=True)
    finally:
        install.uninstall()


def test_the_names_of_the_issue(ours: Ours) -> None:
    te.set_ub_active_shape([16, 32])
    comm = tex.CommOverlapP2P.__new__(tex.CommOverlapP2P)  # never initialised, never cast
    comm.set_buffer_active_shape([16, 32])
    assert comm.get_buffer_active_shape() == (1, 2)
    assert comm.get_buffer_capacity_shape() == (3, 4)
    assert ours.calls == [("set_ub_active_shape", [16, 32]), ("set_buffer_active_shape", comm, [16, 32])]


def test_stock_functions_stay_reachable(ours: Ours) -> None:
    for name in ("initialize_ub", "destroy_ub"):
        assert install.stock(name) is not getattr(te, name)
        assert install.stock(name).__globals__ is vars(te.module.base)


def test_a_te_without_a_name_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(te.module.base, "destroy_ub")
    before = everything()
    with pytest.raises(UBUnsupportedError, match="destroy_ub"):
        Ours().install()
    assert everything() == before
    assert not install.is_installed()


def test_what_somebody_else_replaced_since_is_left_alone(ours: Ours) -> None:
    def theirs() -> None: ...

    original = install.stock("destroy_ub")
    te.destroy_ub = theirs
    try:
        assert install.uninstall() == ["transformer_engine.pytorch.destroy_ub"]
        assert te.destroy_ub is theirs
        assert te.module.base.destroy_ub is original
    finally:
        te.destroy_ub = original


def test_patches_restore_inherited_and_absent_attributes() -> None:
    class Parent:
        def method(self) -> int:
            return 1

    class Child(Parent):
        pass

    patches = Patches()
    with pytest.raises(UBUnsupportedError, match="Child has no function method"):
        patches.replace(Child, "method", lambda original: original)
    patches.replace(Parent, "method", lambda original: lambda self: original(self) + 1)
    patches.add(Child, "other", 5)
    assert (Child().method(), Child.other) == (2, 5)  # type: ignore[attr-defined]
    assert patches.undo() == []
    assert Child().method() == 1
    assert "other" not in vars(Child)
