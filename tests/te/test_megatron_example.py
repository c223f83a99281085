# SPDX-License-Identifier: Apache-2.0
"""The parts of examples/megatron_gpt.py that need no GPU: settings, data, configurations, figures, errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.te


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpt", "packed")]:
        del sys.modules[name]


def settings(*flags: str) -> Any:
    from gpt.settings import parse

    return parse(list(flags))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tp", "1"], "--tp 1: TP overlap needs 2 ranks"),
        (["--layers", "3", "--pp", "2"], "the next valid value is 4"),
        (["--heads", "3"], "--heads 3 must be a multiple of 2"),
        (["--hidden", "520"], "--hidden 520 must be a multiple of 32"),
        (["--vpp", "2"], "--vpp needs --pp 2"),
        (["--pp", "2", "--vpp", "2", "--microbatches", "3"], "--microbatches 3 must be a multiple of 2"),
        (["--mode", "stock", "pad"], "--mode stock runs alone"),
        (["--mode", "pad", "--bucket", "64"], "--bucket belongs to --mode dynamic"),
        (["--steps", "0"], "--steps 0 must be positive"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_settings_that_cannot_be(flags: list[str], text: str) -> None:
    with pytest.raises(Exception, match=text) as raised:
        settings(*flags)
    assert type(raised.value).__name__ == "UsageError"


def test_microbatches_of_real_text() -> None:
    from gpt.work import bucketed, padded, prepare, to_megatron

    chosen = settings("--steps", "3", "--bucket", "256")
    work = prepare(chosen)
    assert len(work.steps) == 3
    assert work.capacity % 256 == 0
    seen = {packed.batch.total_tokens for step in work.steps for packed in step}
    assert len(seen) > 6
    assert 0.2 < work.token_ratio < 1
    packed = work.steps[0][0]
    made = to_megatron(packed, torch.device("cpu"))
    assert made.loss_mask.sum() == packed.batch.real_tokens
    assert made.tokens.shape == (1, packed.batch.total_tokens)
    full = to_megatron(padded(packed, work.capacity), torch.device("cpu"))
    assert full.tokens.shape == (1, work.capacity)
    assert full.loss_mask.sum() == made.loss_mask.sum()
    keys = {bucketed(each, work.capacity, 256).batch.shape_key() for step in work.steps for each in step}
    assert len(keys) <= work.capacity // 256


def test_data_parallel_ranks_share_the_documents() -> None:
    from gpt.work import prepare

    chosen = settings("--steps", "2", "--microbatches", "2")
    texts = [
        document
        for rank in range(2)
        for step in prepare(chosen, 2, rank).steps
        for packed in step
        for document in packed.documents
    ]
    assert len(texts) == 2 * 2 * 4 * 2


@pytest.mark.parametrize("recompute", ["no", "selective", "full"])
@pytest.mark.parametrize("vpp", [None, 2])
def test_megatron_takes_the_configuration(recompute: str, vpp: int | None) -> None:
    from gpt.model import make_config

    from ub_dynamic.integrations.megatron import check_config

    flags = ["--pp", "2", "--recompute", recompute, *([] if vpp is None else ["--vpp", "2"])]
    config = make_config(settings(*flags), overlap=True)
    assert config.tp_comm_overlap and config.variable_seq_lengths and config.sequence_parallel
    check_config(config)


def test_figures() -> None:
    from gpt.report import compare

    def run(mode: str, loss: float, seconds: float) -> Any:
        steps = [
            SimpleNamespace(loss=loss, grad_norm=2 * loss, seconds=each, tokens=int(8 * each))
            for each in (9.0, seconds, seconds)
        ]
        return SimpleNamespace(mode=mode, steps=steps)

    figures = compare([run("dynamic", 1.0, 0.5), run("pad", 1.25, 1.0), run("none", 1.5, 2.0)])
    assert figures == {
        "token_ratio": 0.5,  # of the steps that count, not of all
        "iterations": 3,
        "max_loss_diff": 0.5,
        "max_grad_norm_rel_diff": pytest.approx(1 / 3),
        "max_loss_diff_to_pad": 0.25,
        "max_grad_norm_rel_diff_to_pad": pytest.approx(0.2),
        "dynamic_over_pad_time": 0.5,
    }


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "megatron_gpt.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert "megatron_gpt.py: a CUDA device is needed" in done.stderr


def test_stock_needs_no_install_and_dynamic_does() -> None:
    """What the example shows is that one line."""
    source = (EXAMPLES / "megatron_gpt.py").read_text()
    assert source.count("megatron.install()") == 2  # in the text above and in run_job
    for path in sorted((EXAMPLES / "gpt").glob("*.py")):
        assert "set_ub_active_shape" not in path.read_text(), path


def test_summary_is_json() -> None:
    from gpt.report import summarise

    step = SimpleNamespace(loss=1.0, grad_norm=1.0, seconds=1.0, real_tokens=5, tokens=8)
    run = SimpleNamespace(mode="dynamic", steps=[step], losses=[1.0], graphs=None, rows=list)
    summary = summarise(settings("--mode", "dynamic"), SimpleNamespace(capacity=8, token_ratio=0.5), [run])
    assert json.loads(json.dumps(summary))["modes"]["dynamic"]["tokens"] == 8
