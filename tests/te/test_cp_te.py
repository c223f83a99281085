# SPDX-License-Identifier: Apache-2.0
"""The installed TE as the padding flag and the patches expect it; both come and go without a trace."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformer_engine")
import torch
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

from ub_dynamic.cp import install_pad_resolver, te_backward_patches, te_capabilities, te_patches
from ub_dynamic.cp.pad_hooks import _takes_flag
from ub_dynamic.errors import UBStateError

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
        ({}, None),
    ],
)
def test_each_feature_alone(wanted: dict[str, bool], names: set[str] | None) -> None:
    features = dict.fromkeys(("skip_zero", "no_sync", "reuse"), False) | wanted
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
    assert _takes_flag(before)
    with install_pad_resolver(target) as handle:
        assert handle.installed == (name,)
        assert vars(target)["forward"] is not before
        assert inspect.signature(target.forward) == inspect.signature(before)
    assert vars(target)["forward"] is before


def test_hooks_on_a_module_of_te() -> None:
    module = te.DotProductAttention.__new__(te.DotProductAttention)  # its own constructor wants a GPU
    torch.nn.Module.__init__(module)
    before = dict(module._forward_pre_hooks)
    with install_pad_resolver(module) as handle:
        assert handle.installed == ("DotProductAttention",)
        assert len(module._forward_pre_hooks) == len(before) + 1
    assert dict(module._forward_pre_hooks) == before


def test_importing_the_package_does_not_import_te() -> None:
    code = "import sys, ub_dynamic.cp; assert 'transformer_engine' not in sys.modules and 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
