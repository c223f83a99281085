# SPDX-License-Identifier: Apache-2.0
"""Which communication is chosen, every reason for which a way is refused, and what the model says of costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ub_dynamic.cp import Capabilities, CPProblem, Links, Partition, choose_cp_comm, te_capabilities
from ub_dynamic.cp.capabilities import describe, refuses_hierarchical
from ub_dynamic.cp.choose import Candidate, candidates, refusal
from ub_dynamic.cp.cost import Attention, estimate
from ub_dynamic.errors import UBShapeError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch

NEW = Capabilities("2.20.2", True, True, True, True, True, True, (2, 3, 4))
OLD = Capabilities("2.17.1", thd_p2p=True, thd_a2a=True, flash=(2,))
NONE = Capabilities()
FULL = PackedBatch.from_lengths([64, 128], cp=4)
PADDED = PackedBatch.from_lengths([61, 128], cp=4)


def problem(batch: PackedBatch = FULL, **changes: Any) -> CPProblem:
    return CPProblem(**{"batch": batch, "heads": 8, "kv_heads": 4, **changes})


P2P, A2A, GATHER = (
    Candidate("te", name, *sizes) for name, sizes in (("p2p", (1, 4)), ("a2a", (4, 1)), ("all_gather", (1, 4)))
)  # type: ignore[arg-type]
BOTH, OURS = Candidate("te", "a2a+p2p", 2, 2), Candidate("ub_dynamic", "a2a+p2p", 2, 2)

REFUSED = [
    (BOTH, OLD, {}, "2.17.1 refuses packed sequences with a2a"),
    (GATHER, OLD, {}, "refuses packed sequences with all_gather"),
    (P2P, NONE, {}, "not installed"),
    (P2P, NEW, {"batch": PADDED, "backend": "flash2"}, "FlashAttention 2 cannot take padding"),
    (GATHER, NEW, {"backend": "flash2"}, "TE does not check, and results are wrong"),
    (BOTH, NEW, {"backend": "flash4"}, "excludes FlashAttention 4"),
    (BOTH, NEW, {"batch": PADDED, "backend": "flash3"}, "not covered by TE's own tests"),
    (P2P, OLD, {"backend": "flash3"}, "FlashAttention 3 is not installed"),
    (BOTH, NEW, {"heads": 9, "kv_heads": 9}, "9 heads are no multiple of the all-to-all's 2 ranks"),
    (A2A, NEW, {"kv_heads": 2}, "2 key heads are no multiple of the all-to-all's 4 ranks"),
    (OURS, NONE, {"heads": 9}, "9 heads are no multiple"),
    (P2P, NEW, {"window": True}, "a sliding window needs a2a or all_gather"),
    (P2P, NEW, {"sink": True}, "needs a2a and fused attention"),
    (A2A, NEW, {"sink": True, "backend": "flash3"}, "needs a2a and fused attention"),
    (OURS, NONE, {"window": True}, "a sliding window is not implemented here"),
    (OURS, NONE, {"sink": True}, "a softmax other than vanilla is not implemented here"),
    (P2P, NEW, {"mask": "padding_causal_bottom_right"}, "bottom-right"),
    (P2P, NEW, {"partition": Partition.contiguous()}, "exact for padding"),
    (OURS, NONE, {"partition": Partition.contiguous()}, "exact for padding"),
    (P2P, NEW, {"batch": PADDED, "partition": Partition.contiguous(), "mask": "padding"}, "zigzag rule"),
    (GATHER, NEW, {"partition": Partition.contiguous(), "mask": "padding"}, "puts keys in the zigzag's order"),
]


@pytest.mark.parametrize(("candidate", "capabilities", "changes", "reason"), REFUSED)
def test_refused(candidate: Candidate, capabilities: Capabilities, changes: dict[str, Any], reason: str) -> None:
    said = refusal(problem(**changes), candidate, capabilities)
    assert said is not None
    assert reason in said
    with pytest.raises(UBUnsupportedError, match="no way to compute"):
        choose_cp_comm(
            problem(**changes),
            implementation=candidate.implementation,
            comm_type=candidate.comm_type,
            inner=candidate.inner,
            capabilities=capabilities,
        )


ALLOWED = [
    (P2P, NEW, {"batch": PADDED}),
    (A2A, NEW, {"window": True}),
    (GATHER, NEW, {"window": True, "backend": "flash3", "batch": PADDED}),
    (A2A, NEW, {"sink": True}),
    (BOTH, NEW, {"batch": PADDED}),
    (P2P, OLD, {"backend": "flash2"}),
    (P2P, NEW, {"partition": Partition.contiguous(), "mask": "padding"}),
    (OURS, NONE, {"batch": PADDED}),
    (OURS, NONE, {"batch": PADDED, "partition": Partition.contiguous(), "mask": "no_mask"}),
    (OURS, NONE, {"kv_heads": 1}),
]


@pytest.mark.parametrize(("candidate", "capabilities", "changes"), ALLOWED)
def test_allowed(candidate: Candidate, capabilities: Capabilities, changes: dict[str, Any]) -> None:
    assert refusal(problem(**changes), candidate, capabilities) is None


def test_too_many_sequences_for_te() -> None:
    batch = PackedBatch.from_lengths([8] * 12288, cp=4)
    assert "12287 sequences" in str(refusal(problem(batch), P2P, NEW))
    assert refusal(problem(batch), OURS, NEW) is None


def test_all_candidates_of_four_ranks() -> None:
    assert [str(one) for one in candidates(4)] == [
        "te a2a (A = 4, P = 1)",
        "te a2a+p2p (A = 2, P = 2)",
        "te p2p (A = 1, P = 4)",
        "te all_gather (A = 1, P = 4)",
        "ub_dynamic a2a (A = 4, P = 1)",
        "ub_dynamic a2a+p2p (A = 2, P = 2)",
        "ub_dynamic p2p (A = 1, P = 4)",
    ]


def test_te_first_where_it_can_and_ours_where_it_cannot() -> None:
    assert choose_cp_comm(problem(), comm_type="a2a+p2p", capabilities=NEW).candidate == BOTH
    plan = choose_cp_comm(problem(), comm_type="a2a+p2p", capabilities=OLD)
    assert plan.candidate == OURS
    assert set(plan.refused) == {BOTH}
    assert (
        choose_cp_comm(problem(partition=Partition.contiguous(), mask="padding", batch=PADDED)).candidate.implementation
        == "ub_dynamic"
    )


def test_fewest_bytes_without_rates() -> None:
    plan = choose_cp_comm(problem(heads=64, kv_heads=4), capabilities=NEW)
    assert plan.candidate.comm_type == "p2p"
    assert plan.cost.seconds is None
    assert plan.ranking[-1][0].comm_type == "all_gather"
    sizes = [cost.bytes for _, cost in plan.ranking[:-1]]
    assert sizes == sorted(sizes)
    assert choose_cp_comm(problem(heads=4, kv_heads=4), capabilities=NEW).candidate.comm_type == "a2a"


def test_rates_decide() -> None:
    """Long sequences hide the ring; short ones and a slow outer network want the all-to-all inside."""
    long = PackedBatch.from_lengths([262144], cp=16)
    short = PackedBatch.from_lengths([512] * 16, cp=16)
    rates = {"fast": 300e9, "flops": 500e12, "domain": 8}

    def chosen(batch: PackedBatch, slow: float) -> Candidate:
        return choose_cp_comm(
            problem(batch, heads=32, kv_heads=8), capabilities=NEW, links=Links(slow=slow, **rates)
        ).candidate

    assert chosen(long, slow=50e9).outer > 1
    hierarchical = choose_cp_comm(
        problem(short, heads=32, kv_heads=8), comm_type="a2a+p2p", capabilities=NEW, links=Links(slow=5e9, **rates)
    )
    assert hierarchical.candidate.inner == 8
    ranked = choose_cp_comm(
        problem(long, heads=32, kv_heads=8), capabilities=NEW, links=Links(slow=50e9, **rates)
    ).ranking
    seconds = [cost.seconds for _, cost in ranked]
    assert seconds == sorted(seconds)  # type: ignore[type-var]
    assert all(cost.exposed is not None and 0 <= cost.exposed < cost.seconds for _, cost in ranked)  # type: ignore[operator]


def test_bytes_of_known_sizes() -> None:
    """8 rows a rank, 4 heads and 2 key heads of 16 elements of 2 bytes, 4 ranks."""
    batch, sizes = PackedBatch.from_lengths([32], cp=4), Attention(4, 2, 16, 2, True)
    row = 8 * 16 * 2
    assert estimate(batch, sizes, 4, 1, False, None).inner_bytes == 2 * row * (2 * 4 + 2 * 2) * 3 / 4
    assert estimate(batch, sizes, 4, 1, False, None).outer_bytes == 0
    ring = estimate(batch, sizes, 1, 4, False, None)
    assert (ring.inner_bytes, ring.outer_bytes) == (0, 2 * row * 2 * (3 + 3 + 4))
    assert sizes.work(batch) == 4 * 4 * 16 * 32 * 32 / 2
    assert estimate(batch, sizes, 1, 1, False, None).bytes == 0


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(UBShapeError, match="comm_type = 'ring'.*'p2p'"):
        choose_cp_comm(problem(), comm_type="ring", capabilities=NEW)  # type: ignore[arg-type]
    with pytest.raises(UBShapeError, match="backend = 'flash5'"):
        choose_cp_comm(problem(backend="flash5"), capabilities=NEW)
    with pytest.raises(UBShapeError, match="tail of 64 rows"):
        choose_cp_comm(problem(rows=256), capabilities=NEW)
    with pytest.raises(UBShapeError, match="fast = 0"):
        Links(fast=0, slow=1, flops=1)
    with pytest.raises(UBUnsupportedError, match="exclude all"):
        choose_cp_comm(problem(), inner=3, capabilities=NEW)


def test_probes_of_old_and_new_sources() -> None:
    assert refuses_hierarchical(
        'assert (\n  qkv_format != "thd"\n), f"{qkv_format} format is not supported with hierarchical CP"'
    )
    assert not refuses_hierarchical("assert isinstance(cp_group, list)")
    assert refuses_hierarchical("")

    class Gather:
        @staticmethod
        def forward(ctx, q, cu_seqlens_q_padded): ...  # type: ignore[no-untyped-def]

    old = SimpleNamespace(
        flash_attn_a2a_communicate=lambda a2a_inputs, cp_size: None,
        AttnFuncWithCPAndKVAllGather=Gather,
        AttnFuncWithCPAndKVP2P=object,
    )
    found = describe(old, SimpleNamespace(is_installed=True, v3_is_installed=False), "2.9")
    assert found == Capabilities("2.9", thd_p2p=True, flash=(2,))
    assert found.takes("p2p")
    assert not found.takes("a2a+p2p")


def test_without_te() -> None:
    import importlib.util

    if importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is installed")
    assert te_capabilities() == NONE
