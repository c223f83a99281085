# SPDX-License-Identifier: Apache-2.0
"""The answer to a change of shape, and numbers of tokens as people give them."""

from __future__ import annotations

import copy
import pickle
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from ub_dynamic.errors import UBShapeError
from ub_dynamic.overlap import OverlapConfig
from ub_dynamic.policy import Choice
from ub_dynamic.reports import ShapeReport
from ub_dynamic.shapes import parse_shape, parse_tokens


def test_a_report_is_copied_and_pickled() -> None:
    choices = MappingProxyType({"fc1_fprop": Choice(OverlapConfig("none"), "small T")})
    report = ShapeReport((64, 32), ("fc1_fprop",), MappingProxyType({"fc1_wgrad": "MXFP8"}), choices)
    for twin in (pickle.loads(pickle.dumps(report)), copy.copy(report), copy.deepcopy(report)):
        assert twin == report and type(twin) is ShapeReport and type(twin.skipped) is MappingProxyType


@pytest.mark.parametrize("tokens", [8, np.int64(8), torch.tensor(8)])
def test_numbers_of_tokens(tokens: Any) -> None:
    assert parse_tokens(tokens) == 8 and type(parse_tokens(tokens)) is int


@pytest.mark.parametrize("tokens", [8.0, True, "8", None, np.array([8]), np.array([8, 8]), torch.tensor([8]), [8]])
def test_what_is_no_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(UBShapeError, match="a number of tokens T must be an int, got "):
        parse_tokens(tokens)
    with pytest.raises(UBShapeError, match="two ints, got "):
        parse_shape([tokens, 64])


@pytest.mark.parametrize("tokens", [0, -8])
def test_a_number_of_tokens_is_positive(tokens: int) -> None:
    with pytest.raises(UBShapeError, match=f"T = {tokens}: tokens must be positive"):
        parse_tokens(tokens)


@pytest.mark.parametrize("shape", [np.array([32, 64]), torch.tensor([32, 64]), 32, iter([32, 64])])
def test_a_shape_is_a_list_or_a_tuple(shape: Any) -> None:
    with pytest.raises(UBShapeError, match="two ints in a list or tuple, got"):
        parse_shape(shape)
