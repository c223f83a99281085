# SPDX-License-Identifier: Apache-2.0
"""What a policy puts on the classes of TE's layers: no more than its choices need, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.base as base
from cpu_te import layer
from policy_te import BULK, COLUMN, EVERYTHING, NONE, PIPELINE, RING, installed, switch, te_world

from ub_dynamic.errors import UBUnsupportedError


class TestInstallation:
    def test_nothing_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kinds = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)
        before = {kind: dict(vars(kind)) for kind in kinds}
        with te_world(monkeypatch, EVERYTHING) as world:
            assert {name: len(names) for name, names in installed().items()} == {
                "Linear": 6, "LayerNormLinear": 6, "LayerNormMLP": 5
            }  # fmt: skip
            module = layer("linear", "qkv", **COLUMN)
            switch(world, qkv_fprop=NONE)
            assert module.ub_overlap_ag_fprop is False
        assert installed() == {}
        assert {kind: dict(vars(kind)) for kind in kinds} == before
        assert module.ub_overlap_ag_fprop is True

    def test_only_where_a_choice_needs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, {"proj_fprop": (RING, PIPELINE), "fc1_dgrad": (BULK,)}):
            assert installed() == {}
        with te_world(monkeypatch, {"fc1_dgrad": (RING,)}):
            assert installed()

    def test_a_class_that_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Linear(te.LayerNormMLP):
            def __init__(self) -> None:
                pass

        monkeypatch.setattr(te, "Linear", Linear)
        unknown = pytest.raises(UBUnsupportedError, match="Linear does not set ub_overlap_ag_fprop")
        with unknown, te_world(monkeypatch, {"fc1_dgrad": (RING,)}):
            pass
        assert installed() == {}
        assert base._ub_communicators is None

    def test_descriptors_are_attributes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with te_world(monkeypatch, EVERYTHING):
            module = layer("linear", "qkv", **COLUMN)
            module.ub_bulk_dgrad = False
            assert vars(module)["ub_bulk_dgrad"] is False
            del module.ub_bulk_dgrad
            with pytest.raises(AttributeError, match="ub_bulk_dgrad"):
                _ = module.ub_bulk_dgrad
            with pytest.raises(AttributeError):
                del module.ub_bulk_dgrad

    def test_a_failed_start_takes_the_descriptors_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ub_dynamic.backends.te import initialize

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no backend")

        monkeypatch.setattr(initialize, "TEBackend", fail)
        with pytest.raises(RuntimeError, match="no backend"), te_world(monkeypatch, EVERYTHING):
            pass
        assert installed() == {}
