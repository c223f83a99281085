# SPDX-License-Identifier: Apache-2.0
"""The installed TE as the padding flag and the patches expect it; both come and go without a trace."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformer_engine")
import torch
import torch.distributed as dist
import transformer_engine
import transformer_engine.pytorch as te
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel
from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils

from ub_dynamic.cp import install_pad_resolver, packed, te_backward_patches, te_capabilities, te_patches
from ub_dynamic.cp.pad_hooks import _decides_flag
from ub_dynamic.errors import UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.packing import PackedBatch

pytestmark = pytest.mark.te
RING = context_parallel.AttnFuncWithCPAndKVP2P


def everything(*owners: Any) -> dict[tuple[str, str], Any]:
    return {(str(owner), name): value for owner in owners for name, value in vars(owner).items()}


def test_patches_come_and_go_without_a_trace() -> None:
    before = everything(context_parallel, RING)
    patches = te_backward_patches()
    with patches:
        changed = {
            name for (_, name), value in everything(context_parallel, RING).items() if before[_, name] is not value
        }
        assert changed == {name.split(".")[-1] for name in patches.active}
        assert not patches.refused
        with pytest.raises(UBStateError, match="in place already"):
            te_backward_patches().install()
    after = everything(context_parallel, RING)
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    patches.remove()
    assert patches.active == ()


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({"skip_zero": True}, {"_zero_thd_padding"}),
        ({"no_sync": True}, {"is_graph_capturing"}),
        ({"skip_unseen": True}, {"cp_p2p_fwd_prepare_qkv"}),
        ({}, None),
    ],
)
def test_each_feature_alone(wanted: dict[str, bool], names: set[str] | None) -> None:
    features = dict.fromkeys(("skip_zero", "no_sync", "reuse", "skip_unseen"), False) | wanted
    with te_backward_patches(**features) as patches:
        ring = {"AttnFuncWithCPAndKVP2P.forward", "AttnFuncWithCPAndKVP2P.backward"}
        assert set(patches.active) == (set() if names is None else ring | names)


def test_a_missing_name_is_left_alone_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(context_parallel, "_zero_thd_padding")
    patches = te_backward_patches()
    with pytest.warns(UserWarning, match="stay unpatched: _zero_thd_padding: there is none") as warned:
        patches.install()
    assert len(warned) == 1
    assert "_zero_thd_padding" not in patches.active
    assert "is_graph_capturing" in patches.active
    patches.remove()


def test_another_signature_of_the_ring_leaves_everything_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(ctx, q, k, v, boundaries): ...  # type: ignore[no-untyped-def]

    monkeypatch.setattr(RING, "forward", staticmethod(forward))
    before = everything(context_parallel, RING)
    patches = te_backward_patches()
    with pytest.warns(UserWarning, match=r"AttnFuncWithCPAndKVP2P\.forward: it has no parameter cu_seqlens_q"):
        patches.install()
    assert patches.active == ()
    assert everything(context_parallel, RING) == before
    patches.remove()


def test_probe_of_something_else() -> None:
    assert set(te_patches.probe(ModuleType("other"))) == {*te_patches._NEEDS, "tex"}
    assert te_patches.probe(context_parallel) == {}


def test_capabilities_of_the_installed_version() -> None:
    found = te_capabilities()
    assert found.te == str(transformer_engine.__version__)
    assert found.thd_p2p
    assert found.patches
    if tuple(map(int, found.te.split(".")[:2])) >= (2, 20):
        assert found.thd_a2a
        assert found.thd_a2a_p2p
        assert found.thd_all_gather
        assert found.no_load_balance


@pytest.mark.parametrize("name", ["DotProductAttention", "MultiheadAttention"])
def test_te_modules_take_the_flag_and_get_their_forward_back(name: str) -> None:
    target = getattr(te, name)
    before = vars(target)["forward"]
    assert _decides_flag(before)
    with install_pad_resolver(target) as handle:
        assert handle.installed == (name,)
        assert vars(target)["forward"] is not before
        assert inspect.signature(target.forward) == inspect.signature(before)
    assert vars(target)["forward"] is before


def test_hooks_go_on_attention_modules_and_not_on_the_backends_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # constructors only ask
    model = torch.nn.ModuleDict({"attention": te.MultiheadAttention(64, 4, device="cpu")})
    before = [dict(module._forward_pre_hooks) for module in model.modules()]
    with install_pad_resolver(model) as handle:
        assert handle.installed == ("attention", "attention.core_attention")
        added = [len(module._forward_pre_hooks) for module in model.modules()]
        assert sum(added) == sum(map(len, before)) + 2
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == before
    for target in (backends.FusedAttention, model["attention"].core_attention.fused_attention):
        with pytest.raises(UBUnsupportedError, match="decide"):
            install_pad_resolver(target)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _attention(monkeypatch: pytest.MonkeyPatch) -> tuple[te.DotProductAttention, list[bool | None]]:
    """TE's module down to its backend, which only notes the flag that it is given."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(te.DotProductAttention, "prepare_forward", lambda self, inp, *_, **__: inp)
    monkeypatch.setattr(dpa_utils, "get_attention_backend", lambda _: (False, None, True, 0, False, None))
    flags: list[bool | None] = []

    def backend(self: Any, query: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        flags.append(kwargs["pad_between_seqs"])
        return query

    monkeypatch.setattr(backends.FusedAttention, "forward", functools.wraps(backends.FusedAttention.forward)(backend))
    module = te.DotProductAttention(4, 64, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module, flags


def _call(module: te.DotProductAttention, batch: PackedBatch, rows: int) -> None:
    kwargs = batch.dpa_kwargs("cpu")
    kwargs["cu_seqlens_q_padded"] = kwargs["cu_seqlens_kv_padded"] = kwargs["cu_seqlens_q_padded"].clone()
    q, k, v = torch.zeros(3, rows, 4, 64, dtype=torch.bfloat16).unbind()
    with packed(batch):
        module(q, k, v, **{**kwargs, "pad_between_seqs": None})


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("comm_type", [None, "p2p", "a2a", "all_gather", "a2a+p2p"])
@pytest.mark.parametrize("group_first", [True, False])
@pytest.mark.parametrize("lengths", [(64, 128), (64, 100)], ids=["full", "padded"])
def test_a_call_of_te_has_the_rows_of_its_group(
    monkeypatch: pytest.MonkeyPatch, comm_type: str | None, group_first: bool, lengths: tuple[int, ...]
) -> None:
    """Rows are local, boundaries those of all ranks; the group counts as it is at the call, by TE's own attribute."""
    module, flags = _attention(monkeypatch)
    group = None if comm_type is None else dist.group.WORLD
    if comm_type == "a2a+p2p":
        group = [dist.new_group([0, 1]), dist.new_group([0, 2])]

    def set_group() -> None:
        if group is not None:
            module.set_context_parallel_group(group, [0, 1, 2, 3], None, comm_type)

    if group_first:
        set_group()
    batch = PackedBatch.from_lengths(lengths, cp=1 if group is None else 4, align=8)
    with install_pad_resolver(module):
        if group is not None and not group_first:
            with pytest.raises(UBShapeError, match="set_context_parallel_group"):
                _call(module, batch, batch.local_tokens)
        set_group()
        _call(module, batch, batch.local_tokens)
        with pytest.raises(UBShapeError, match="packed rows over all context-parallel ranks"):
            _call(module, batch, batch.local_tokens + 8)
        with pytest.raises(UBShapeError, match="fewer than the last padded boundary"):
            _call(module, batch, batch.local_tokens - 8)
    assert flags == [batch.has_padding]


def test_importing_the_package_does_not_import_te() -> None:
    code = "import sys, ub_dynamic.cp; assert 'transformer_engine' not in sys.modules and 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
