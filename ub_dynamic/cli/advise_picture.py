# SPDX-License-Identifier: Apache-2.0
"""A workload as a picture: how often each T occurs, and how many tokens each way of shaping processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..advise import Report

_TOKENS, _EMPTY, _INK, _CAPACITY = "#3b7ea1", "#d9d9d9", "#222222", "#c0392b"
_BINS = 60


def draw(found: Report, path: Path) -> None:
    """Write the picture of `found` to `path`, in the format that its suffix names."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    asked = found.workload
    how = "packed" if asked.plan == "packed" else f"{asked.documents} documents each"
    figure.suptitle(
        f"{len(found.lengths):,} documents in {len(found.tokens):,} microbatches ({how}), tp {asked.tp}, cp {asked.cp}",
        fontsize=12,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    _draw_tokens(left, found)
    _draw_strategies(right, found)
    figure.savefig(path, dpi=150)


def _draw_tokens(axes: Axes, found: Report) -> None:
    capacity = found.workload.capacity
    edges = np.linspace(0, capacity, _BINS + 1).tolist()
    axes.hist(found.tokens.values, bins=edges, weights=found.tokens.counts, color=_TOKENS)
    axes.axvline(capacity, color=_CAPACITY, linewidth=1.5)
    where: dict[str, Any] = {"va": "top", "ha": "right", "transform": axes.get_xaxis_transform()}
    axes.text(0.985 * capacity, 0.98, "capacity", color=_CAPACITY, **where)
    axes.axvline(found.tokens.mean, color=_INK, linewidth=1, linestyle="--")
    mean, beside = found.tokens.mean, 0.01 * capacity
    left = mean > capacity / 2
    where["ha"] = "right" if left else "left"
    axes.text(mean - beside if left else mean + beside, 0.9, f"mean {mean:,.0f}", color=_INK, **where)
    axes.set_xlabel("T of a microbatch, tokens")
    axes.set_ylabel("microbatches")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_strategies(axes: Axes, found: Report) -> None:
    shown = [each for each in found.strategies if not each.name.endswith("equal buckets")]
    whole = found.padded.tokens
    for row, each in enumerate(shown):
        share = each.tokens / whole
        holding = share * (1 - each.waste)
        axes.barh(row, holding, color=_TOKENS, label="tokens of documents" if row == 0 else None)
        axes.barh(row, share - holding, left=holding, color=_EMPTY, label="nothing" if row == 0 else None)
        axes.text(share + 0.01, row, f"{share:.1%}", va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(shown)), [each.name for each in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.set_xlabel("rows processed, of those padded to capacity")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.1), ncols=2, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
