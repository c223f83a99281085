# SPDX-License-Identifier: Apache-2.0
"""What a chunk layout is called and what its chunks hold: the words of the table and of the picture."""

from __future__ import annotations

from ..shapes import Chunk, ChunkLayout


def title(found: ChunkLayout) -> str:
    """One line that says which layout it is."""
    dtype = str(found.dtype).removeprefix("torch.")
    (tokens, hidden), splits = found.active, f", num_splits {found.num_splits}" * (found.method == "pipeline")
    return (
        f"{found.method} {found.collective}: T = {tokens:,} of {found.capacity[0]:,}, H = {hidden:,}, "
        f"tp {found.tp}{splits}, {dtype}"
    )


def role(chunk: Chunk, found: ChunkLayout) -> str:
    """What a chunk holds, seen from one rank."""
    if found.method == "pipeline":
        return f"output columns of GEMM {chunk.index}"
    if found.receive_slots:
        if chunk.index in found.receive_slots:
            return "received and summed"
        return "own GEMM output, summed" if chunk.index in found.reduce_slots else "GEMM output, sent"
    return f"rows of rank {chunk.index}" if found.collective == "ag" else f"partial sums for rank {chunk.index}"
