# SPDX-License-Identifier: Apache-2.0
"""A time is a positive, finite number of seconds, wherever it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ub_dynamic.board import RankBoard
from ub_dynamic.errors import UBStateError
from ub_dynamic.groups import SoloGroup, default_timeout_s
from ub_dynamic.manager import check_arguments
from ub_dynamic.testing.one_gpu import OneGpu

RULE = "it is a positive, finite number of seconds, as 20 is"


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "20", pytest.param(10**400, id="huge")])
@pytest.mark.parametrize(
    ("give", "name"),
    [
        (lambda value: check_arguments("strict", value), "timeout"),
        (lambda value: OneGpu(2, timeout_s=value), "timeout_s"),
        (lambda value: RankBoard(SoloGroup(), timeout_s=value), "timeout_s"),
        (lambda value: RankBoard(SoloGroup()).wait_for_all(value), "timeout_s"),
    ],
)
def test_an_argument_that_is_no_time(give: Callable[[Any], object], name: str, value: Any) -> None:
    with pytest.raises(UBStateError, match=f"^{name} = .*: {RULE}$"):
        give(value)


@pytest.mark.parametrize("value", [20, 0.5, np.int64(20), np.float32(0.5)])
def test_an_argument_that_is_a_time(value: float) -> None:
    check_arguments("strict", value)
    assert OneGpu(2, timeout_s=value).timeout_s == value


@pytest.mark.parametrize("text", ["abc", "-1", "0", "inf", "nan", ""])
def test_a_setting_that_is_no_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_DYNAMIC_TIMEOUT", text)
    with pytest.raises(UBStateError, match=f"^UB_DYNAMIC_TIMEOUT = .*: {RULE}$"):
        default_timeout_s()


def test_a_setting_that_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UB_DYNAMIC_TIMEOUT", "2.5")
    assert default_timeout_s() == 2.5
    monkeypatch.delenv("UB_DYNAMIC_TIMEOUT")
    assert default_timeout_s() == 20
