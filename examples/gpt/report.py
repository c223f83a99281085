# SPDX-License-Identifier: Apache-2.0
"""What a run shows at its end: numbers in one dictionary, a table of them, and the picture of the loss."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = {"dynamic": "#0072b2", "pad": "#d55e00", "none": "#7f7f7f"}


def summarise(settings: argparse.Namespace, work: Any, runs: Sequence[Any]) -> dict[str, Any]:
    """Everything that a job shows, by mode."""
    return {
        "tp": settings.tp,
        "pp": settings.pp,
        "capacity": work.capacity,
        "token_ratio": work.token_ratio,
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()},
        "modes": {run.mode: _mode(run) for run in runs},
        "figures": compare(runs),
        "rows": [row for run in runs for row in run.rows()],
    }


def compare(runs: Sequence[Any]) -> dict[str, float]:
    """How far dynamic is from the run without TP overlap (from pad where that did not run), and its time over pad's.

    The first step is left out of the times, and of the token ratio that they are compared with.
    """
    by_mode = {run.mode: run.steps for run in runs}
    dynamic, pad = by_mode.get("dynamic"), by_mode.get("pad")
    figures: dict[str, float] = {}
    if dynamic is not None:
        figures["iterations"] = len(dynamic)
        for name, reference in (("none", by_mode.get("none")), ("pad", pad)):
            if reference is not None:
                pairs = list(zip(dynamic, reference, strict=True))
                suffix = "" if name == "none" or "none" not in by_mode else "_to_pad"
                figures[f"max_loss_diff{suffix}"] = max(abs(a.loss - b.loss) for a, b in pairs)
                figures[f"max_grad_norm_rel_diff{suffix}"] = max(
                    abs(a.grad_norm - b.grad_norm) / b.grad_norm for a, b in pairs
                )
    if dynamic is not None and pad is not None:
        figures["dynamic_over_pad_time"] = _seconds(dynamic) / _seconds(pad)
        figures["token_ratio"] = sum(step.tokens for step in _counted(dynamic)) / sum(
            step.tokens for step in _counted(pad)
        )
    return figures


def table(summary: Mapping[str, Any]) -> Any:
    """The end of a run, for reading; every number is one of ``summary.json``."""
    from rich.table import Table

    title = f"tp {summary['tp']}, pp {summary['pp']}, capacity {summary['capacity']:,} tokens"
    result = Table(title=title, title_justify="left")
    result.add_column("")
    for mode in summary["modes"]:
        result.add_column(mode, justify="right")
    lines = (
        ("tokens of documents", "real_tokens", "{:,}"),
        ("tokens processed", "tokens", "{:,}"),
        ("seconds in steps", "seconds", "{:.2f}"),
        ("first loss", "loss_first", "{:.4f}"),
        ("last loss", "loss_last", "{:.4f}"),
        ("CUDA graphs", "graphs", "{}"),
    )
    for label, key, form in lines:
        result.add_row(label, *(form.format(mode[key]) for mode in summary["modes"].values()))
    return result


def draw(path: Path, summary: Mapping[str, Any]) -> None:
    """The loss of every mode, and T of a microbatch against the time of a step."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for width, mode in zip((4, 1.4, 1.4), summary["modes"], strict=False):
            rows = [row for row in summary["rows"] if row["mode"] == mode]
            look = {"color": COLORS[mode], "label": mode, "alpha": 0.5 if width > 2 else 1.0}
            left.plot([row["step"] + 1 for row in rows], [row["loss"] for row in rows], linewidth=width, **look)
            right.scatter([row["real_tokens"] for row in rows], [1e3 * row["seconds"] for row in rows], s=16, **look)
        left.set(title="Loss", xlabel="optimizer step", ylabel="nats a byte")
        right.set(title="Time of a step", xlabel="tokens of its documents", ylabel="ms", ylim=(0, None))
        right.xaxis.set_major_formatter("{x:,.0f}")
        for axes in (left, right):
            axes.legend(frameon=False, fontsize=9)
        figure.savefig(path, dpi=160)


def _mode(run: Any) -> dict[str, Any]:
    return {
        "real_tokens": sum(step.real_tokens for step in run.steps),
        "tokens": sum(step.tokens for step in run.steps),
        "seconds": _seconds(run.steps),
        "loss_first": run.losses[0],
        "loss_last": run.losses[-1],
        "graphs": run.graphs.captures if run.graphs is not None else 0,
    }


def _counted(steps: Sequence[Any]) -> Sequence[Any]:
    return steps[1:] if len(steps) > 1 else steps


def _seconds(steps: Sequence[Any]) -> float:
    return sum(step.seconds for step in _counted(steps))
