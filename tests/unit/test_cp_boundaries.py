# SPDX-License-Identifier: Apache-2.0
"""Sequences of which a step of TE's ring has keys but no queries."""

from __future__ import annotations

import pytest
import torch

from ub_dynamic.cp import unseen_keys
from ub_dynamic.cp.boundary_tables import BoundaryTables, keys_seen_on_device
from ub_dynamic.cp.plan import zigzag_counts
from ub_dynamic.packing import PackedBatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("inner", [1, 2])
def test_they_are_those_of_which_some_step_has_keys_and_no_queries(cp: int, inner: int) -> None:
    ring = cp // inner
    longest = (2 * cp - 1) ** 2 + 2 * cp
    batch = PackedBatch.from_lengths(range(longest), cp=cp)
    starved = torch.zeros(longest, dtype=torch.bool)
    for rank in range(ring):
        for step in range(1, ring):
            source = (rank - step) % ring
            halves = ((True, True), (True, False)) if source < rank else ((False, True), (True, True))
            queries, keys = (
                zigzag_counts(batch, ring, r, *half)[:longest] for r, half in zip((rank, source), halves, strict=True)
            )
            assert not ((queries > 0) & (keys == 0)).any()  # in a causal ring, never the other way round
            starved |= (queries == 0) & (keys > 0)
    found = unseen_keys(batch, ring)
    assert [at for at in found if at < longest] == starved.nonzero().flatten().tolist()
    if inner == 1:
        assert max(found) == (2 * cp - 1) ** 2


def test_whole_sequences_have_none() -> None:
    assert unseen_keys(PackedBatch.from_lengths((1, 3, 8), cp=4), ring=1) == ()
    assert unseen_keys(PackedBatch.from_lengths((8, 16), cp=4), ring=4) == ()


@pytest.mark.parametrize("rank", range(4))
def test_tables_and_device_agree(rank: int) -> None:
    batch = PackedBatch.from_lengths((13, 1, 0, 40, 9, 8), cp=4)
    tables = BoundaryTables(batch, 4, rank, CPU)
    changed = 0
    sections = {"lower-triangle": ((True, True), (True, False)), "upper-triangle": ((False, True), (True, True))}
    for step in range(1, 4):
        for section, (of_queries, of_keys) in sections.items():
            queries, keys = tables.real(rank, *of_queries), tables.real((rank - step) % 4, *of_keys)
            seen = tables.keys_seen(section, step)
            on_device = keys_seen_on_device(queries, keys)
            assert on_device.dtype == torch.int32
            assert torch.equal(on_device, keys if seen is None else seen)
            assert seen is None or (seen.dtype == torch.int32 and not torch.equal(seen, keys))
            changed += seen is not None
    assert changed


def test_a_batch_of_long_sequences_has_no_table_of_them() -> None:
    tables = BoundaryTables(PackedBatch.from_lengths((509, 1000, 255), cp=4), 4, 1, CPU)
    assert all(tables.keys_seen(section, step) is None for section in ("lower-triangle", "all") for step in (1, 2, 3))
