# SPDX-License-Identifier: Apache-2.0
"""What :mod:`ub_dynamic.cp.te_patches` puts in place of TE's functions, and what one call of the ring knows.

The knowledge is fixed in the forward and kept on its autograd context, since the backward runs on another thread,
and after the forwards of other batches. While a call runs, it is this thread's current one.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..metadata import indexed
from .boundary_tables import BoundaryTables, boundary_tables, keys_seen_on_device, tail_safe_padding_mask
from .current import batch_of
from .pad_flag import capturing, check_tail

BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
ON_RANK = ("cu_seqlens", "cu_seqlens_padded_on_cp_rank", "cp_size", "cp_rank", "first_half", "second_half")


class _Call:
    """What is known about one forward and its backward. ``unpadded``: no row needs cleaning. ``paired``: keys and
    values have one shape, so that in TE's buffers values lie behind keys as a second tensor like them."""

    def __init__(self, unpadded: bool, tables: BoundaryTables | None, rank: int, paired: bool) -> None:
        self.unpadded, self.tables, self.rank, self.paired = unpadded, tables, rank, paired
        self._halves: dict[int, tuple[torch.Tensor, torch.Tensor, Any, Any]] = {}
        self._values: tuple[int, torch.Tensor] | None = None

    def second_half(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``read(tensor)``, once for each tensor; steps run on two streams, so a later one waits for the first."""
        stream = torch.cuda.current_stream() if tensor.is_cuda else None
        known = self._halves.get(id(tensor))
        if known is not None:
            _, half, where, done = known
            if stream is not None and stream != where:
                stream.wait_event(done)
            return half
        half, done = read(tensor), None
        if stream is not None:
            done = torch.cuda.Event()
            done.record(stream)
        self._halves[id(tensor)] = (tensor, half, stream, done)
        return half

    def first_half(self, tensor: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``read(tensor)``, of keys together with the values behind them, for which it is asked next."""
        waiting, self._values = self._values, None
        if waiting is not None and waiting[0] == tensor.data_ptr():
            return waiting[1]
        size = tensor.numel() * tensor.element_size()
        behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size() - size
        if not self.paired or tensor.dim() != 3 or behind < size:
            return read(tensor)
        keys, values = read(tensor.as_strided((2, *tensor.shape), (tensor.numel(), *tensor.stride())))
        self._values = (tensor.data_ptr() + size, values)
        return keys

    def forget_halves(self) -> None:
        self._halves.clear()
        self._values = None


class _Local(threading.local):
    call: _Call | None = None
    in_flash_backward: bool = False


_local = _Local()


@contextmanager
def _during(call: _Call | None, in_flash_backward: bool = False) -> Iterator[None]:
    before = _local.call, _local.in_flash_backward
    _local.call, _local.in_flash_backward = call, in_flash_backward
    try:
        yield
    finally:
        _local.call, _local.in_flash_backward = before
        if call is not None:
            call.forget_halves()


def ring_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    places = _places(original)

    def forward(ctx: Any, *args: Any) -> Any:
        given = [ctx, *args]
        call = _describe(lambda name: given[places[name]])
        if call is not None and call.tables is not None:
            for name in BOUNDARIES[2:]:
                given[places[name]] = _Quotients.of(given[places[name]], call.tables.quotients)
        ctx.ub_dynamic_call = call
        with _during(call):
            return original(*given)

    return forward


def ring_backward(original: Callable[..., Any], no_sync: bool) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        flash = no_sync and not getattr(ctx, "use_fused_attention", True)
        with _during(getattr(ctx, "ub_dynamic_call", None), flash):
            return original(ctx, *grads)

    return backward


def _describe(given: Callable[[str], Any]) -> _Call | None:
    """What is known about a call with these arguments. :class:`UBShapeError` for a tail known to be uncovered."""
    if given("qkv_format") != "thd":
        return None
    group = given("cp_group")
    groups = group if isinstance(group, list) else [group]
    ring, rank = groups[-1].size(), groups[-1].rank()
    boundaries = [given(name) for name in BOUNDARIES]
    cp = ring * (groups[0].size() if len(groups) > 1 else 1)
    paired = given("k").shape == given("v").shape
    batch = batch_of(*boundaries)
    if batch is not None:
        check_tail(batch.total_tokens, given("q").shape[0] * cp)
    # A padded batch with the flag False: padded boundaries were passed as real ones, or the flag is wrong.
    if batch is None or batch.cp != cp or (batch.has_padding and not given("pad_between_seqs")):
        return _Call(False, None, rank, paired)
    tables = None if capturing() else boundary_tables(batch, ring, rank, indexed(given("q").device))
    return _Call(not batch.has_padding, tables, rank, paired)


class _Quotients(torch.Tensor):
    """A boundary tensor that knows some of its quotients, so that ``tensor // n`` launches nothing."""

    known: dict[int, torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
        aware = tensor.as_subclass(cls)
        aware.known = known
        return aware

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__floordiv__ and isinstance(args[1], int) and args[1] in args[0].known:
            return args[0].known[args[1]]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class TexWithMemory:
    """``transformer_engine_torch`` that reads second halves, of queries, once a layer, and first ones of keys and
    values, which differ from step to step, in one launch."""

    def __init__(self, tex: Any) -> None:
        self._tex = tex

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tex, name)

    def thd_read_half_tensor(self, tensor: torch.Tensor, cu_seqlens: torch.Tensor, half_idx: int) -> torch.Tensor:
        def read(tensor: torch.Tensor) -> torch.Tensor:
            return self._tex.thd_read_half_tensor(tensor, cu_seqlens, half_idx)

        call = _local.call
        if call is None:
            return read(tensor)
        return call.second_half(tensor, read) if half_idx else call.first_half(tensor, read)


def zero_padding(
    tensors: tuple[torch.Tensor | None, ...], cu_seqlens: torch.Tensor | None, cu_seqlens_padded: torch.Tensor | None
) -> None:
    call = _local.call
    given = [tensor for tensor in tensors if tensor is not None]
    if cu_seqlens is None or cu_seqlens_padded is None or not given or (call is not None and call.unpadded):
        return
    if call is not None and call.tables is not None:
        mask = call.tables.padding_mask(call.rank)
    else:
        mask = tail_safe_padding_mask(given[0].shape[0], cu_seqlens, cu_seqlens_padded)
    for tensor in given:
        tensor.masked_fill_(mask.view(-1, *[1] * (tensor.dim() - 1)), 0)


def capture_flag(original: Callable[[], bool]) -> Callable[[], bool]:
    def is_graph_capturing() -> bool:
        # Under capture TE zeroes tails by a mask instead of by a slice at a boundary that it reads back.
        return _local.in_flash_backward or original()

    return is_graph_capturing


def boundaries_on_rank(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def get_cu_seqlens_on_cp_rank(
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded_on_cp_rank: torch.Tensor,
        cp_size: int,
        cp_rank: int,
        first_half: bool,
        second_half: bool,
    ) -> torch.Tensor:
        call = _local.call
        if call is not None and call.tables is not None:
            return call.tables.real(cp_rank, first_half, second_half)
        return original(cu_seqlens, cu_seqlens_padded_on_cp_rank, cp_size, cp_rank, first_half, second_half)

    return get_cu_seqlens_on_cp_rank


def prepare(original: Callable[..., Any], reuse: bool, skip_unseen: bool) -> Callable[..., Any]:
    """``reuse``: quotients of boundaries are those of the tables. ``skip_unseen``: no keys where there are no
    queries (:mod:`.boundary_tables`), from the tables or, where the batch is not known, made on the device."""
    places = _places(original)

    def cp_p2p_fwd_prepare_qkv(*args: Any) -> Any:
        call = _local.call
        if call is None:
            return original(*args)
        if not args[places["pad_between_seqs"]]:
            return original(*(_with_quotients(args, places, call.tables) if reuse and call.tables else args))
        *qkv, cu_seqlens_q, cu_seqlens_kv = original(*args)
        section = args[places["section"]]
        if skip_unseen and section != "diagonal" and args[places["cp_size"]] > 1:
            if call.tables is None:
                cu_seqlens_kv = keys_seen_on_device(cu_seqlens_q, cu_seqlens_kv)
            elif (seen := call.tables.keys_seen(section, args[places["step"]])) is not None:
                cu_seqlens_kv = seen
        return (*qkv, cu_seqlens_q, cu_seqlens_kv)

    return cp_p2p_fwd_prepare_qkv


def _with_quotients(args: tuple[Any, ...], places: dict[str, int], tables: BoundaryTables) -> list[Any]:
    given = list(args)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        given[places[name]] = _Quotients.of(given[places[name]], tables.quotients)
    return given


def halved_boundaries(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where a section has half the keys or queries, TE halves their padded boundaries, their only use there."""
    places = _places(original)
    halved = {"lower-triangle": "cu_seqlens_kv_padded", "upper-triangle": "cu_seqlens_q_padded"}

    def with_halved_boundaries(*args: Any) -> Any:
        call = _local.call
        name = halved.get(args[places["section"]])
        if call is None or call.tables is None or name is None:
            return original(*args)
        given = list(args)
        given[places[name]] = _Quotients.of(given[places[name]], {2: call.tables.of_half})
        return original(*given)

    return with_halved_boundaries


def _places(function: Callable[..., Any]) -> dict[str, int]:
    return {name: place for place, name in enumerate(inspect.signature(function).parameters)}
