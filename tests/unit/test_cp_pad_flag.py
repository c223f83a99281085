# SPDX-License-Identifier: Apache-2.0
"""TE's padding flag: what decides it, in which order, and that recomputation gets the same answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ub_dynamic.cp import pad_flag
from ub_dynamic.cp.current import batch_of, current_batch, packed
from ub_dynamic.cp.pad_flag import PadResolver, resolve_pad_between_seqs
from ub_dynamic.cp.pad_hooks import install_pad_resolver
from ub_dynamic.errors import UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch


def boundaries(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class DotProductAttention(torch.nn.Module):
    """The parameters of TE's module that matter; remembers what it was told."""

    def __init__(self, qkv_format: str = "thd", cp: int | None = None) -> None:
        super().__init__()
        self.qkv_format = qkv_format
        self.cp_group = None if cp is None else SimpleNamespace(size=lambda: cp)
        self.seen: list[bool | None] = []

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        pad_between_seqs=None,
    ):
        self.seen.append(pad_between_seqs)
        return query_layer * query_layer


class MegatronAttention(DotProductAttention):
    """As Megatron's subclass: a forward of its own, which calls that of TE."""

    def forward(self, query, params):
        return super().forward(query, query, **params)


# ---- the rule ------------------------------------------------------------------------------------------------


def test_equal_but_distinct_tensors_of_a_known_batch_are_unpadded() -> None:
    """TE issue #3487."""
    batch = PackedBatch.from_lengths([64, 128], cp=4)
    real, padded = boundaries(0, 64, 192), boundaries(0, 64, 192)
    with packed(batch):
        assert resolve_pad_between_seqs(real, real, padded, padded) is False
    assert resolve_pad_between_seqs(real, real, padded, padded, policy="sync_once") is False
    assert resolve_pad_between_seqs(real, real, padded, padded) is True


def test_padding_of_the_last_sequence_alone_counts() -> None:
    """TE issue #3331: 698 tokens in 704 rows at cp 4."""
    batch = PackedBatch.from_lengths([698], cp=4)
    real, padded = boundaries(0, 698), boundaries(0, 704)
    with packed(batch):
        assert resolve_pad_between_seqs(real, real, padded, padded) is True
    assert resolve_pad_between_seqs(real, real, padded, padded, policy="sync_once") is True


@pytest.mark.parametrize("explicit", [True, False])
def test_explicit_comes_first(explicit: bool) -> None:
    real, padded = boundaries(0, 8), boundaries(0, 8)
    for policy in ("conservative", "sync_once", "error"):
        assert resolve_pad_between_seqs(real, real, padded, padded, explicit=explicit, policy=policy) is explicit


def test_order_of_what_decides() -> None:
    real, padded = boundaries(0, 8), boundaries(0, 8)
    resolver = PadResolver("error")

    def source(*given: torch.Tensor | None, **options: object) -> str:
        return resolver.resolve(given, **options).source  # type: ignore[arg-type]

    assert source(real, real, padded, padded, explicit=True) == "explicit"
    assert source(None, None, None, None, qkv_format="bshd") == "not THD"
    assert source(real, real, None, None) == "no padded boundaries"
    assert source(real, real, real, real) == "alias"
    assert source(real, real, real.detach(), real.view(-1)) == "alias"
    with packed(PackedBatch.from_lengths([8], cp=4)):
        assert source(real, real, padded, padded) == "packed batch"
    assert source(real, real, padded, padded) == "remembered"
    padded += 0  # written to: no longer what was seen
    with pytest.raises(UBStateError, match="pass it, use PackedBatch"):
        source(real, real, padded, padded)


def test_key_and_query_boundaries_both_count() -> None:
    q, kv = boundaries(0, 8), boundaries(0, 7)
    assert resolve_pad_between_seqs(q, kv, q, boundaries(0, 8), policy="sync_once") is True
    assert resolve_pad_between_seqs(kv, q, boundaries(0, 8), q, policy="sync_once") is True


def test_sync_once_reads_each_set_of_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = pad_flag._read
    monkeypatch.setattr(pad_flag, "_read", lambda given: reads.append(1) or original(given))
    resolver = PadResolver("sync_once")
    real, padded = boundaries(0, 8), boundaries(0, 8)
    for _ in range(5):
        assert not resolver.resolve((real, real, padded, padded)).pad_between_seqs
    assert len(reads) == 1
    resolver.forget()
    resolver.resolve((real, real, padded, padded))
    assert len(reads) == 2


def test_remembered_tensors_stay_alive_and_are_few() -> None:
    resolver = PadResolver("sync_once")
    for length in range(1, 200):
        real, padded = boundaries(0, length), boundaries(0, length + length % 2)
        assert resolver.resolve((real, real, padded, padded)).pad_between_seqs is bool(length % 2)
    assert len(resolver._remembered) == 64


@pytest.mark.parametrize("policy", ["conservative", "sync_once", "error"])
def test_nothing_is_read_or_remembered_during_capture(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    real, padded = boundaries(0, 8), boundaries(0, 8)
    resolver = PadResolver(policy)  # type: ignore[arg-type]
    with packed(PackedBatch.from_lengths([8], cp=4)):
        resolver.resolve((real, real, padded, padded))
    monkeypatch.setattr(pad_flag, "capturing", lambda: True)
    monkeypatch.setattr(pad_flag, "_read", lambda _: pytest.fail("read during capture"))
    # A static buffer may hold other values by now, so what was remembered before is not used.
    if policy == "conservative":
        assert resolver.resolve((real, real, padded, padded)) == (True, "policy")
    else:
        with pytest.raises(UBStateError):
            resolver.resolve((real, real, padded, padded))
    assert resolver.resolve((real, real, padded, padded), explicit=False).source == "explicit"
    with packed(PackedBatch.from_lengths([8], cp=4)):
        assert resolver.resolve((real, real, padded, padded)).source == "packed batch"


def test_te_capture_flag_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    assert not pad_flag.capturing()
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch.graph", SimpleNamespace(is_graph_capturing=lambda: True)
    )
    assert pad_flag.capturing()


def test_wrong_policy_is_named() -> None:
    with pytest.raises(UBShapeError, match="'never'.*'conservative', 'sync_once', 'error'"):
        PadResolver("never")  # type: ignore[arg-type]


# ---- tails ---------------------------------------------------------------------------------------------------


def test_known_uncovered_tail_is_named() -> None:
    batch = PackedBatch.from_lengths([60, 4], cp=4)
    real, padded = boundaries(0, 60, 64), boundaries(0, 64, 72)
    assert batch.total_tokens == 72
    with packed(batch), pytest.raises(UBShapeError, match=r"tail of 8 rows.*device-side assert.*ghost sequence"):
        PadResolver().resolve((real, real, padded, padded), rows=80)
    with pytest.raises(UBShapeError, match=r"tail of 8 rows"):
        PadResolver("sync_once").resolve((real, real, padded, padded), rows=80)
    with packed(batch), pytest.raises(UBShapeError, match="fewer than the last padded boundary, 72"):
        PadResolver().resolve((real, real, padded, padded), explicit=True, rows=64)


def test_packed_batch_leaves_no_tail() -> None:
    for tail in ("ghost", "ghost_padding", "extend_last"):
        batch = PackedBatch.from_lengths([13, 40], cp=2, align=64, tail=tail)  # type: ignore[arg-type]
        assert batch.cu_seqlens_padded[-1] == batch.total_tokens


# ---- which batch ---------------------------------------------------------------------------------------------


def test_scopes_nest_and_end() -> None:
    first, second = (PackedBatch.from_lengths([length], cp=2) for length in (4, 8))
    assert current_batch() is None
    with packed(first):
        with packed(second):
            assert current_batch() is second
        assert current_batch() is first
    assert current_batch() is None


def test_boundaries_of_another_number_of_sequences_are_not_the_batch() -> None:
    with packed(PackedBatch.from_lengths([4, 4], cp=2)):
        assert batch_of(boundaries(0, 4, 8)) is not None
        assert batch_of(boundaries(0, 4)) is None
        assert batch_of() is None


def test_a_batch_is_found_by_its_own_tensors_while_it_lives() -> None:
    batch = PackedBatch.from_lengths([5, 8], cp=2)
    with packed(batch):
        own = batch.device_metadata("cpu")
    real, padded = own.cu_seqlens, own.cu_seqlens_padded
    assert batch_of(real, padded) is batch
    assert batch_of(real.detach(), padded.detach()) is batch
    assert batch_of(real.clone()) is None
    other = PackedBatch.from_lengths([8, 8], cp=2)
    with packed(other):
        pass
    del batch
    assert batch_of(real, padded) is None


def test_bound_backward_sees_its_batch_and_only_there() -> None:
    first, second = (PackedBatch.from_lengths([length], cp=2) for length in (4, 8))
    seen: list[PackedBatch | None] = []

    def forward(batch: PackedBatch) -> torch.Tensor:
        with packed(batch) as scope:
            x = torch.ones(2, requires_grad=True)
            hidden = x * 2
            hidden.register_hook(lambda grad: seen.append(current_batch()))
            out = hidden * 3
            assert scope.bind_backward(out) is out
        return out

    one, two = forward(first), forward(second)
    one.sum().backward()
    assert current_batch() is None
    two.sum().backward()
    assert seen == [first, second]
    with packed(first):
        assert current_batch() is first


# ---- modules -------------------------------------------------------------------------------------------------


def arguments(real: torch.Tensor, padded: torch.Tensor | None, **more: object) -> dict[str, object]:
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return dict(zip(names, (real, real, padded, padded), strict=True)) | more


def test_hooks_fill_in_the_flag_and_go() -> None:
    model = torch.nn.ModuleList([DotProductAttention(), torch.nn.Linear(2, 2), DotProductAttention("bshd")])
    x, real = torch.ones(8, 1), boundaries(0, 8)
    with install_pad_resolver(model) as handle:
        assert handle.installed == ("0", "2")
        model[0](x, x, **arguments(real, real))
        model[0](x, x, **arguments(real, real.clone()))
        model[0](x, x, **arguments(real, real.clone(), pad_between_seqs=False))
        model[0](x, x, None, real, real, real, real)
        model[0](x, x, None, real, real, real, real, None)
        model[0](x, x, "bshd")
        model[2](x, x)
    model[0](x, x, **arguments(real, real))
    assert model[0].seen == [False, True, False, False, False, False, None]
    assert model[2].seen == [False]
    handle.remove()


def test_hook_checks_the_tail_over_all_ranks() -> None:
    module = DotProductAttention(cp=4)
    batch = PackedBatch.from_lengths([64], cp=4)
    real = boundaries(0, 64)
    with install_pad_resolver(module), packed(batch):
        module(torch.ones(16, 1), None, **arguments(real, real))
        with pytest.raises(UBShapeError, match="80 packed rows over all context-parallel ranks"):
            module(torch.ones(20, 1), None, **arguments(real, real))
    module.cp_group = [SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 2)]
    with install_pad_resolver(module), packed(batch):
        module(torch.ones(16, 1), None, **arguments(real, real))


def test_a_subclass_with_its_own_forward_needs_the_class() -> None:
    module = MegatronAttention()
    x, real = torch.ones(8, 1), boundaries(0, 8)
    with pytest.raises(UBUnsupportedError, match=r"install_pad_resolver\(DotProductAttention\)"):
        install_pad_resolver(module)
    before = vars(DotProductAttention)["forward"]
    with install_pad_resolver(DotProductAttention):
        module(x, arguments(real, real))
        module(x, arguments(real, real.clone()))
    assert vars(DotProductAttention)["forward"] is before
    module(x, arguments(real, real))
    assert module.seen == [False, True, None]


def test_modules_without_the_flag_are_refused() -> None:
    with pytest.raises(UBUnsupportedError, match="no module in Linear decides pad_between_seqs"):
        install_pad_resolver(torch.nn.Linear(2, 2))
    with pytest.raises(UBUnsupportedError, match=r"Linear\.forward does not decide"):
        install_pad_resolver(torch.nn.Linear)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("copies", ["same", "cloned inside", "cloned before", "saved on another device"])
def test_forward_and_recomputation_agree(reentrant: bool, copies: str) -> None:
    """TE itself compares objects, which checkpoints replace by detached ones, so forward and recomputation differ."""
    module = DotProductAttention()
    batch = PackedBatch.from_lengths([8, 16], cp=4)
    other = PackedBatch.from_lengths([5, 9], cp=4)
    own = batch.device_metadata("cpu")
    real, padded = own.cu_seqlens, own.cu_seqlens_padded
    if copies == "cloned before":
        real, padded = real.clone(), padded.clone()

    def attention(x: torch.Tensor, real: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        if copies == "cloned inside":
            real, padded = real.clone(), padded.clone()
        return module(x, x, **arguments(real, padded))

    x = torch.ones(batch.total_tokens, 1, requires_grad=True)
    pack = (torch.clone, torch.clone) if copies.startswith("saved") else (lambda t: t, lambda t: t)
    with install_pad_resolver(module):
        with packed(batch) as scope, torch.autograd.graph.saved_tensors_hooks(*pack):
            out = checkpoint(attention, x, real, padded, use_reentrant=reentrant)
            scope.bind_backward(out)
        with packed(other):
            pass
        out.sum().backward()
    assert module.seen == [False, False]
