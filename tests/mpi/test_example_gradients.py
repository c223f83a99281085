# SPDX-License-Identifier: Apache-2.0
"""The example's model has the same gradients on two ranks as on one: each rank's part, and the sums of the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ub_dynamic as ub

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

LENGTHS = [90, 33, 7]


def gradients(tp: int, rank: int) -> dict[str, torch.Tensor]:
    """By parameter name, after one microbatch with padding at the end."""
    from packed.data import lay_out, pack
    from packed.model import ModelConfig, PackedTransformer

    from ub_dynamic.backends.host import all_reduce_sequence_parallel_gradients
    from ub_dynamic.planning import plan_fixed_count

    documents = [bytes(range(length)) for length in LENGTHS]
    packed = pack(documents, plan_fixed_count(LENGTHS, 3, tp=4))[0]  # T is a multiple of 4 for every tp here
    ub.initialize_ub([256, 64], tp, dtype=torch.float32, backend="host")
    model = PackedTransformer(ModelConfig(hidden=64, layers=2, heads=4), rank, tp)
    with ub.microbatch(packed.batch) as microbatch:
        loss = microbatch.bind_backward(model(lay_out(packed)))
    loss.backward()
    all_reduce_sequence_parallel_gradients(model)
    ub.destroy_ub()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.mpi(2)
def test_gradients_do_not_depend_on_tp(mpi_comm: Any) -> None:
    mine, whole = gradients(2, mpi_comm.rank), gradients(1, 0)
    assert mine.keys() == whole.keys()
    for name, gradient in mine.items():
        expected = whole[name]
        assert expected.any(), name
        for dim in (0, 1):
            if gradient.shape != expected.shape and gradient.shape[dim] != expected.shape[dim]:
                expected = expected.tensor_split(2, dim)[mpi_comm.rank]
        torch.testing.assert_close(
            gradient, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
