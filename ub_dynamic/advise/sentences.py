# SPDX-License-Identifier: Apache-2.0
"""What to change, in sentences: each is a function of the report that has something to say, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from .report import Report

_NEAR = 0.02  # costs that differ by less are called the same


def advice(report: Report) -> list[str]:
    """Every sentence that fits, what does not work at all first."""
    found = (rule(report) for rule in _RULES)
    return [sentence for sentence in found if sentence]


def _too_large(report: Report) -> str | None:
    if not report.too_large:
        return None
    total = report.too_large + len(report.tokens)
    return (
        f"{report.too_large:,} of {total:,} microbatches do not fit and are left out of every other figure: the "
        f"largest needs T = {report.largest_needed:,}. Register that, put fewer documents into a microbatch, or pack "
        f"(--plan packed)."
    )


def _too_long(report: Report) -> str | None:
    if not report.too_long:
        return None
    room = report.workload.room()
    what = "are counted as split" if report.workload.plan == "packed" else "fit into no microbatch"
    return (
        f"{report.too_long:,} documents have more than the {room:,} rows of a microbatch and {what}: split or crop "
        f"them, register a larger capacity, or use more context parallelism."
    )


def _gain(report: Report) -> str:
    exact, padded = report.exact, report.padded
    saved = 1 - exact.tokens / padded.tokens
    if saved < _NEAR:
        return (
            f"Padding to capacity costs {saved:.1%} of the tokens: microbatches are full, and an active shape saves "
            f"little here."
        )
    return (
        f"Set T per microbatch: {saved:.1%} of the tokens that padding to capacity processes hold nothing, and a step "
        f"takes about {exact.time_ratio:.2g} of its time."
    )


def _buckets(report: Report) -> str | None:
    """The fewest best buckets that are about as good as exact T, if they save graphs."""
    best = [each for each in report.strategies if each.name.endswith("best buckets")]
    near = [each for each in best if each.tokens <= (1 + _NEAR) * report.exact.tokens]
    if not near or near[0].graphs >= report.exact.graphs:
        return None
    chosen = near[0]
    more = chosen.tokens / report.exact.tokens - 1
    borders = ", ".join(f"{border:,}" for border in chosen.borders)
    return (
        f"For CUDA graphs {len(chosen.borders)} buckets are enough: T padded to {borders} processes {more:.1%} more "
        f"tokens than exact T, with {chosen.graphs} graphs instead of {report.exact.graphs:,}."
    )


def _capacity(report: Report) -> str | None:
    largest, capacity = report.tokens.largest, report.workload.capacity
    if largest >= capacity or report.too_large:
        return None
    sentence = f"The largest T that occurs is {largest:,}: a capacity of {largest:,} is enough"
    if report.buffer_bytes and report.needed_bytes:
        return f"{sentence}, and saves {mebibytes(report.buffer_bytes - report.needed_bytes)} of buffers on each rank."
    return f"{sentence}."


def _larger_microbatches(report: Report) -> str | None:
    """Fixed counts only: microbatches that could be put together."""
    if report.workload.plan == "packed" or report.too_large:
        return None
    together = report.workload.capacity // report.tokens.largest
    if together > 1:
        documents = together * report.workload.documents
        return f"Any {together} microbatches fit into one: {documents} documents a microbatch stay within the capacity."
    if report.fewest < 0.9 * len(report.tokens):
        return (
            f"Packed by length the same documents could fill as few as {report.fewest:,} microbatches instead of "
            f"{len(report.tokens):,}: see --plan packed."
        )
    return None


def _window(report: Report) -> str | None:
    found = len(report.tokens)
    if report.workload.plan == "fixed" or found <= (1 + _NEAR) * report.fewest:
        return None
    return (
        f"{found:,} microbatches, where {report.fewest:,} would hold all rows: a larger --window than "
        f"{report.workload.window:,} documents may need fewer."
    )


def mebibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:,.1f} MiB"


_RULES: tuple[Callable[[Report], str | None], ...] = (
    _too_large,
    _too_long,
    _gain,
    _buckets,
    _capacity,
    _larger_microbatches,
    _window,
)
