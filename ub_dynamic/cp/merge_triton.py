# SPDX-License-Identifier: Apache-2.0
"""One CUDA launch that merges up to four partial softmaxes; see :mod:`ub_dynamic.cp.merge`."""

# mypy: ignore-errors
# Triton's language is not typed Python.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .merge import FOLD, Part

_TILE = 2048  # elements of one program, so that they stay in registers


@triton.jit
def _log(lse, mask, row, heads, H: tl.constexpr):
    used = tl.load(mask + row) != 0
    return tl.load(lse + row * H + heads, mask=(heads < H) & used, other=float("-inf"))


@triton.jit
def _term(out, log, floor, index, live):
    # A part without weight is not read: what is there may be anything.
    weight = tl.exp(log - floor)
    value = tl.load(out + index, mask=live & (weight > 0.0)[:, None], other=0.0).to(tl.float32)
    return weight, weight[:, None] * value


@triton.jit
def _merge(
    o0, o1, o2, o3, o_before, l0, l1, l2, l3, l_before, m0, m1, m2, m3, out, lse,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    live = (heads < H)[:, None] & (columns < D)[None, :]
    index = row * H * D + heads[:, None] * D + columns[None, :]

    a0 = _log(l0, m0, row, heads, H)
    top = a0
    if PARTS > 1:
        a1 = _log(l1, m1, row, heads, H)
        top = tl.maximum(top, a1)
    if PARTS > 2:
        a2 = _log(l2, m2, row, heads, H)
        top = tl.maximum(top, a2)
    if PARTS > 3:
        a3 = _log(l3, m3, row, heads, H)
        top = tl.maximum(top, a3)
    if BEFORE:
        before = tl.load(l_before + row * H + heads, mask=heads < H, other=float("-inf"))
        top = tl.maximum(top, before)

    floor = tl.where(top == float("-inf"), 0.0, top)
    total, merged = _term(o0, a0, floor, index, live)
    if PARTS > 1:
        weight, term = _term(o1, a1, floor, index, live)
        total += weight
        merged += term
    if PARTS > 2:
        weight, term = _term(o2, a2, floor, index, live)
        total += weight
        merged += term
    if PARTS > 3:
        weight, term = _term(o3, a3, floor, index, live)
        total += weight
        merged += term
    if BEFORE:
        weight, term = _term(o_before, before, floor, index, live)
        total += weight
        merged += term

    seen = total > 0.0
    merged = tl.where(seen[:, None], merged / tl.where(seen, total, 1.0)[:, None], 0.0)
    tl.store(out + index, merged.to(out.dtype.element_ty), mask=live)
    log = tl.where(seen, floor + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(lse + row * H + heads, log, mask=heads < H)


def merge_triton(
    parts: list[Part], before: tuple[torch.Tensor, torch.Tensor] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ub_dynamic.cp.merge.merge_parts` for float16, bfloat16 and float32 on CUDA."""
    rows, heads, size = parts[0][0].shape
    outs = [out.contiguous() for out, _, _ in parts]
    logs = [lse.contiguous() for _, lse, _ in parts]
    masks = [mask for _, _, mask in parts]
    missing = FOLD - len(parts)  # unused arguments need some pointer
    merged = torch.empty((rows, heads, size), dtype=dtype, device=outs[0].device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=merged.device)
    block_d = triton.next_power_of_2(size)
    block_h = min(triton.next_power_of_2(heads), max(_TILE // block_d, 1))
    _merge[(rows, triton.cdiv(heads, block_h))](
        *outs, *outs[:1] * missing, outs[0] if before is None else before[0],
        *logs, *logs[:1] * missing, logs[0] if before is None else before[1],
        *masks, *masks[:1] * missing, merged, lse,
        H=heads, D=size, BLOCK_H=block_h, BLOCK_D=block_d, PARTS=len(parts), BEFORE=before is not None,
    )  # fmt: skip
    return merged, lse
