# SPDX-License-Identifier: Apache-2.0
"""TE's ``initialize_ub`` as far as it can go without a GPU, and the groups that it is called with."""

from __future__ import annotations

import ctypes
from typing import Any

import fakes
import pytest
import torch
import transformer_engine.pytorch.module.base as base
import transformer_engine_torch as tex

from ub_dynamic.backends.te import create_te_backend
from ub_dynamic.groups import SoloGroup

CAPACITY = (256, 64)
NONE, FP8 = fakes.MODES.NONE, fakes.MODES.FP8


class Group(SoloGroup):
    """The TP group of a rank whose peer always answers the same."""

    rank, size = 0, 2
    members = (0, 1)
    answer = ""

    def allgather(self, value: Any, what: str) -> list[Any]:
        return [value, self.answer]


class TwinGroup(Group):
    """The TP group of a rank whose peer does as it does."""

    def allgather(self, value: Any, what: str) -> list[Any]:
        return [value, value]


class Stock:
    """TE's ``initialize_ub`` as far as it can go without a GPU: it makes the helper and fills the table."""

    def __init__(self, failure: BaseException | None = None, **methods: str) -> None:
        self.given: dict[str, Any] = {}
        self.before: Any = None
        self.failure, self.methods = failure, methods

    def __call__(
        self, shape: Any, tp_size: int, use_fp8: bool = False, quantization_modes: Any = None, dtype: Any = None,
        ub_cfgs: Any = None, bootstrap_backend: Any = None, with_cublasmp: bool = False,
    ) -> None:  # fmt: skip
        self.given = {name: value for name, value in locals().items() if name != "self"}
        base._ub_communicators = {}
        if self.before is not None:
            self.before()
        helper = tex.CommOverlapHelper("world", "domain")
        assert helper == "helper"
        modes = tuple(mode.value for mode in quantization_modes)
        table = fakes.table(tuple(shape), tp_size, modes=modes, **self.methods)
        for comm in table.values():
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(comm))  # the helper's leak: TE holds them alone
        for number, (key, comm) in enumerate(table.items()):
            if number == 5 and self.failure is not None:
                raise self.failure
            base._ub_communicators[key] = comm
        base._ub_initialized = True


def use(monkeypatch: pytest.MonkeyPatch, stock: Stock) -> Stock:
    monkeypatch.setattr(base, "initialize_ub", stock)
    return stock


def create(**changes: Any) -> Any:
    arguments = {
        "capacity": CAPACITY, "tp_size": 2, "use_fp8": False, "quantization_modes": None, "dtype": torch.bfloat16,
        "ub_cfgs": None, "bootstrap_backend": None, "with_cublasmp": False, "group": Group(),
    }  # fmt: skip
    return create_te_backend(*(arguments | changes).values())
