# SPDX-License-Identifier: Apache-2.0
"""The words for where ranks ran, made and read again."""

from __future__ import annotations

import pytest

from ub_dynamic.modes import CPU_MPI, gpu_mode, is_mode, ranks_apart, ranks_on_one_gpu, shares_gpu


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_what_is_made_is_read_again(ranks: int) -> None:
    together, apart = gpu_mode(ranks, shared=True), gpu_mode(ranks, shared=False)
    assert (together, apart) == (f"one-gpu-{ranks}-ranks", f"{ranks}-gpus")
    assert is_mode(together) and is_mode(apart) and is_mode(CPU_MPI)
    assert (ranks_on_one_gpu(together), ranks_apart(together)) == (ranks, 0)
    assert (ranks_on_one_gpu(apart), ranks_apart(apart)) == (0, ranks)
    assert shares_gpu(together) is (ranks > 1) and not shares_gpu(apart)


@pytest.mark.parametrize("text", ["", "gpus", "0-gpus", "one-gpu-0-ranks", "one-gpu--2-ranks", "2-gpus ", "cpu"])
def test_other_words_are_no_mode(text: str) -> None:
    assert not is_mode(text) and not ranks_on_one_gpu(text) and not ranks_apart(text)
    assert not shares_gpu(CPU_MPI) and not ranks_apart(CPU_MPI)
