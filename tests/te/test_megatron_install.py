# SPDX-License-Identifier: Apache-2.0
"""The adapter and the real megatron-core: what is replaced, that nothing of it stays, and versions that lack it."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core as core
import megatron.core.packed_seq_params as packed_seq_params
import megatron.core.pipeline_parallel.schedules as schedules
import pytest
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.base as base
from megatron.core.transformer.transformer_block import TransformerBlock

from ub_dynamic import UBShapeError, UBStateError, UBUnsupportedError, api
from ub_dynamic.integrations import megatron
from ub_dynamic.integrations.megatron import adapter

pytestmark = pytest.mark.te

SIGNATURES = json.loads(Path(__file__).with_name("megatron_signatures.json").read_text())


@pytest.fixture(autouse=True)
def taken_back() -> Any:
    yield
    megatron.uninstall()


def namespaces() -> dict[str, dict[str, Any]]:
    """Everything that could be replaced, as it is now."""
    owners = [te, te.module, base, te.DotProductAttention, schedules, packed_seq_params.PackedSeqParams]
    for where, name in adapter.BLOCKS:
        try:
            module = importlib.import_module(f"megatron.core.{where}")
        except ImportError:
            continue
        owners += [module, getattr(module, name)] if hasattr(module, name) else []
    return {f"{owner!r}": dict(vars(owner)) for owner in owners}


def test_what_is_replaced_and_that_nothing_stays() -> None:
    before = namespaces()
    assert not megatron.is_installed()
    megatron.install(check="strict", guard=True)
    assert megatron.is_installed()
    changed = {
        f"{owner.split('.')[-1].strip(chr(39) + '>')}.{name}"
        for owner, names in namespaces().items()
        for name, value in names.items()
        if before[owner].get(name) is not value
    }
    assert {"TransformerBlock.forward", "MultiTokenPredictionLayer.forward"} <= changed
    assert schedules.forward_step.__wrapped__ is before[repr(schedules)]["forward_step"]
    assert megatron.uninstall() == []
    assert namespaces() == before
    assert megatron.uninstall() == []


def test_a_second_call_replaces_the_first() -> None:
    before = namespaces()
    megatron.install()
    megatron.install(auto=True)
    assert TransformerBlock.forward.__wrapped__ is before[repr(TransformerBlock)]["forward"]
    megatron.uninstall()
    assert namespaces() == before


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"check": "nonsense"}, UBStateError, "check = 'nonsense'"),
        ({"pad_policy": "nonsense"}, UBShapeError, "policy = 'nonsense'"),
        ({"no_such": 1}, TypeError, "no_such"),
        ({"config": SimpleNamespace(tp_comm_overlap=True, delay_wgrad_compute=True)}, UBUnsupportedError, "delay"),
    ],
)
def test_bad_arguments_change_nothing(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    before = namespaces()
    with pytest.raises(kind, match=text):
        megatron.install(**options)
    assert namespaces() == before
    megatron.install()
    first, adapting = namespaces(), adapter.adapter()
    with pytest.raises(kind, match=text):
        megatron.install(**options)
    assert namespaces() == first
    assert adapter.adapter() is adapting


def test_a_megatron_without_packed_sequences_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()
    with monkeypatch.context() as patch:
        patch.delattr(packed_seq_params, "PackedSeqParams")
        with pytest.raises(UBUnsupportedError, match="no PackedSeqParams"):
            megatron.install()
    assert namespaces() == before
    assert not megatron.is_installed()


def test_a_replacement_by_somebody_else_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron.install()
    theirs = lambda *args, **kwargs: None  # noqa: E731
    ours = schedules.forward_step
    schedules.forward_step = theirs
    try:
        assert megatron.uninstall() == ["megatron.core.pipeline_parallel.schedules.forward_step"]
        assert schedules.forward_step is theirs
    finally:
        schedules.forward_step = ours.__wrapped__


def test_signatures_stay_what_they_were() -> None:
    before = [inspect.signature(function) for function in (TransformerBlock.forward, schedules.forward_step)]
    megatron.install()
    assert [inspect.signature(function) for function in (TransformerBlock.forward, schedules.forward_step)] == before


def test_an_unknown_version_is_refused_with_nothing_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(schedules, "forward_step")
    before = namespaces()
    with pytest.raises(UBUnsupportedError, match="forward_step") as raised:
        megatron.install()
    assert core.__version__ in str(raised.value)
    assert "0.16.1 and 0.19.2 are known to work" in str(raised.value)
    assert namespaces() == before


def test_a_forward_without_packed_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerBlock, "forward", lambda self, hidden_states: None)
    before = namespaces()
    with pytest.raises(UBUnsupportedError, match="does not take packed_seq_params"):
        megatron.install()
    assert namespaces() == before


def test_stock_userbuffers_are_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_ub_communicators", {})
    with pytest.raises(UBStateError, match=r"call install\(\) before Megatron initialises"):
        megatron.install()


def test_a_configuration_is_refused_at_install() -> None:
    before = namespaces()
    with pytest.raises(UBUnsupportedError, match="delay_wgrad_compute = True"):
        megatron.install(SimpleNamespace(tp_comm_overlap=True, delay_wgrad_compute=True))
    assert namespaces() == before


def test_after_uninstall_what_others_kept_of_it_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = adapter._COMBINED[0]
    monkeypatch.setattr(schedules, name, lambda *args: "ran")
    megatron.install()
    kept = getattr(schedules, name)
    megatron.uninstall()
    monkeypatch.setattr(api, "_manager", object())
    assert kept() == "ran"


@pytest.mark.parametrize("name", adapter._COMBINED)
def test_combined_1f1b_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ran: list[int] = []
    monkeypatch.setattr(schedules, name, lambda *args: ran.append(1))
    megatron.install()
    getattr(schedules, name)()
    assert ran == [1]  # without UserBuffers it is nobody's business
    monkeypatch.setattr(api, "_manager", object())
    with pytest.raises(UBUnsupportedError, match="overlap_moe_expert_parallel_comm = True"):
        getattr(schedules, name)()
    assert ran == [1]


def test_this_version_has_the_recorded_signatures() -> None:
    """The record of the version that imports here is right, so that of the other says something too."""
    recorded = SIGNATURES.get(core.__version__)
    if recorded is None:
        pytest.skip(f"no record of megatron-core {core.__version__}")
    for path, wanted in recorded.items():
        module, _, name = path.partition(":")
        if wanted is None:
            with pytest.raises((ImportError, AttributeError)):
                getattr(importlib.import_module(module), name.split(".")[0])
            continue
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        assert list(inspect.signature(found).parameters) == wanted, path


@pytest.mark.parametrize("version", sorted(SIGNATURES))
def test_every_known_version_has_what_is_needed(version: str) -> None:
    record = SIGNATURES[version]
    schedule = "megatron.core.pipeline_parallel.schedules"
    assert record[f"{schedule}:forward_step"]
    for name in adapter._COMBINED:
        assert record[f"{schedule}:{name}"]
    for number, (where, name) in enumerate(adapter.BLOCKS):
        parameters = record[f"megatron.core.{where}:{name}.forward"]
        assert parameters or number > 1
        assert parameters is None or {"hidden_states", "packed_seq_params"} <= set(parameters)
    fields = record["megatron.core.packed_seq_params:PackedSeqParams"]
    assert {"cu_seqlens_q_padded", "cu_seqlens_kv_padded", "local_cp_size", "cp_group"} <= set(fields)
    assert ("pad_between_seqs" in fields) == (version != "0.16.1")
    assert version in adapter.KNOWN
