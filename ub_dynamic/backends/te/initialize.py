# SPDX-License-Identifier: Apache-2.0
"""Runs TE's own ``initialize_ub`` and makes a backend of what it created, on all ranks or on none."""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ...board import RankBoard
from ...errors import UBShapeError, UBStateError, UBUnsupportedError
from ...groups import Group, bootstrap_timeout_s
from ...shapes import Shape
from ..protocol import Alternatives
from ..quantization import NONE, Mode, resolve_modes
from . import hazards
from . import native as native_file
from .alternatives import arrange, construct
from .backend import TEBackend
from .build import find_te
from .communicators import CUBLASMP, Communicator, communicator_name, read_communicators
from .install import stock
from .patches import Patches
from .plans import Plans
from .shutdown import Bootstrap, destroy_objects

logger = logging.getLogger("ub_dynamic")
_MINIMUM = (2, 10)


def create_te_backend(
    capacity: Shape,
    tp_size: int,
    use_fp8: bool,
    quantization_modes: Sequence[Any] | None,
    dtype: torch.dtype,
    ub_cfgs: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None,
    bootstrap_backend: str | None,
    with_cublasmp: bool,
    group: Group,
    board: RankBoard | None = None,
    alternatives: Alternatives | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> TEBackend:
    """The arguments are those of TE's ``initialize_ub``; ``group`` is the TP group on the host, ``board``
    its rank board, whose fast path becomes native.

    Every rank of the world calls it. Where the native file cannot be used, for the reason that is logged, the
    communicators are made all the same and stay at capacity. Without ``bootstrap_backend`` gloo is taken, else
    NCCL: never MPI, which TE prefers and which ends ranks that no mpirun started.

    ``alternatives``: what a policy may choose for each GEMM. It needs the native file, and BF16 alone. ``confirm`` is
    called before TE's own function, in which every rank of the world waits for every other.

    Raises :class:`UBStateError` if TE is initialised already, the :class:`UBShapeError` family,
    :class:`UBUnsupportedError`, and what TE raises; TE can be initialised again afterwards.
    """
    base = _import_te()
    if vars(base)["_ub_communicators"] is not None:
        raise UBStateError("TE's UserBuffers are already initialised, not by this package: call te.destroy_ub")
    _check_topology(tp_size, group)
    # raises for what TE or its kernels would not take
    modes = resolve_modes(capacity, tp_size, dtype, ub_cfgs, quantization_modes, use_fp8, with_cublasmp)
    kinds = [base.UserBufferQuantizationMode(mode.value) for mode in modes]
    cfgs = [mode.cfgs for mode in modes]
    if not with_cublasmp:
        for mode in modes:
            for name in mode.pipelined_dgrads:
                hazards.refuse_pipelined(name, mode.quantised)
    arrangement = None
    if alternatives:
        _check_choosing(modes, with_cublasmp)
        arrangement = arrange(alternatives, cfgs[0], capacity, tp_size, dtype)
        cfgs = [arrangement.ub_cfgs]
    native, reason = _load_native(group)
    if arrangement is not None and native is None:
        raise UBUnsupportedError(f"a policy needs the native file: {reason}")
    confirm()
    bootstrap, plans = Bootstrap(), None
    try:
        with _kept(bootstrap):
            _call_stock(
                shape=list(capacity),
                tp_size=tp_size,
                quantization_modes=kinds,
                dtype=dtype,
                ub_cfgs=cfgs,
                bootstrap_backend=bootstrap_backend or ("gloo" if dist.is_gloo_available() else "nccl"),
                with_cublasmp=with_cublasmp,
            )
        if arrangement is not None and native is not None:
            construct(arrangement, _table(base), kinds[0], capacity, tp_size, dtype, native, bootstrap)
        pipelined = [communicator_name((name, mode.value)) for mode in modes for name in mode.pipelined_dgrads]
        communicators = read_communicators(_table(base), capacity, tp_size, native, reason, pipelined)
        registry, reason = _register(native, communicators, group)
        if reason:
            communicators = read_communicators(_table(base), capacity, tp_size, None, reason)
        if arrangement is not None and native is not None:
            if reason:
                raise UBUnsupportedError(f"a policy needs the native file: {reason}")
            plans = Plans(arrangement, communicators, native, registry, vars(base), kinds[0])
        backend = TEBackend(
            communicators, capacity, group, native=native, registry=registry, bootstrap=bootstrap, plans=plans
        )
        if native is not None and board is not None:
            board.use_native(native.Board)
        _log(backend)
        return backend
    except BaseException as error:
        if plans is not None:
            plans.close()
        # A half-filled table would refuse the next initialize_ub, and the traceback's variables keep it alive.
        traceback.clear_frames(error.__traceback__)
        destroy_objects({communicator_name(key): weakref.ref(obj) for key, obj in _table(base).items()}, native)
        bootstrap.release(group)
        raise


def _import_te() -> ModuleType:
    version, _ = find_te()
    if tuple(int(part) for part in version.split(".")[:2]) < _MINIMUM:
        raise UBUnsupportedError(f"Transformer Engine {version} is older than 2.10: pip install -U transformer-engine")
    if torch.version.hip is not None:
        raise UBUnsupportedError("ROCm's Transformer Engine has other communicators; only CUDA builds are supported")
    try:
        import transformer_engine.pytorch.module.base as base
    except ImportError as error:
        raise UBUnsupportedError(f"Transformer Engine {version} does not import: {error}") from error
    return base


def _table(base: ModuleType) -> dict[Any, Any]:
    """TE's communicators by key; empty before and after."""
    return vars(base)["_ub_communicators"] or {}


def _check_topology(tp_size: int, group: Group) -> None:
    if not dist.is_initialized():
        raise UBStateError("TE's UserBuffers need torch.distributed: call torch.distributed.init_process_group first")
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % tp_size:
        raise UBShapeError(f"tp_size = {tp_size} does not divide the world of {world} ranks")
    first = rank // tp_size * tp_size
    wanted = list(range(first, first + tp_size))
    if list(group.members) != wanted:
        raise UBUnsupportedError(f"TE takes contiguous ranks as TP group, here {wanted}, not {list(group.members)}")


def _check_choosing(modes: Sequence[Mode], with_cublasmp: bool) -> None:
    if with_cublasmp:
        raise UBUnsupportedError("a policy chooses between TE's own communicators, cuBLASMp has others: leave one out")
    if [mode.value for mode in modes] != [NONE]:
        raise UBUnsupportedError(
            f"a policy chooses for BF16 alone, not for quantization modes {[mode.value for mode in modes]}: FP8 modes "
            "have communicators of their own, and one flag of a layer serves both"
        )


def _call_stock(**arguments: Any) -> None:
    """TE's own function, or somebody's wrapper, with the arguments that every version has; TE 2.17 brought
    ``with_cublasmp``, which is given where it is asked for."""
    function = stock("initialize_ub")
    given = {name: value for name, value in arguments.items() if value or name != "with_cublasmp"}
    accepted = inspect.signature(function).parameters
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    if not open_ended and (lost := given.keys() - accepted.keys()):
        if lost == {"with_cublasmp"}:
            raise UBUnsupportedError("with_cublasmp came with Transformer Engine 2.17; this one is older")
        raise UBUnsupportedError(
            f"TE's initialize_ub was replaced by {function!r}, which does not take {', '.join(sorted(lost))}"
        )
    function(**given)


@contextlib.contextmanager
def _kept(bootstrap: Bootstrap) -> Iterator[None]:
    """Keeps what TE's function makes and drops, though the shared communicator goes on calling it.

    Its process groups wait for half an hour by default for a rank that failed; here, for a few minutes.
    """
    import transformer_engine_torch as tex

    limit = timedelta(seconds=bootstrap_timeout_s())

    def keep(original: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            bootstrap.groups += args
            bootstrap.helper = original(*args, **kwargs)
            return bootstrap.helper

        return make

    def bound(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **{"timeout": limit, **kwargs})

    def note(original: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            bootstrap.usual = kwargs
            return original(*args, **kwargs)

        return make

    patches = Patches()
    patches.replace(tex, "CommOverlapHelper", keep)
    patches.replace(tex, "CommOverlap", note)
    patches.replace(dist, "new_group", bound)
    patches.replace(dist, "new_subgroups_by_enumeration", bound)
    try:
        yield
    finally:
        patches.undo()


def _load_native(group: Group) -> tuple[ModuleType | None, str]:
    """The native file on all ranks or on none, then with the reason of a rank that lacks it."""
    native, reason = None, ""
    try:
        native = native_file.load()
    except UBUnsupportedError as error:
        reason = str(error)
    reason = _any_reason(group, reason)
    return (None, reason) if reason else (native, "")


def _register(native: ModuleType | None, communicators: Sequence[Communicator], group: Group) -> tuple[Any, str]:
    """All dynamic communicators in one native registry, each one tested; or None and why not, on any rank."""
    if native is None:
        return None, ""
    registry, reason = native.Registry(), ""
    try:
        for comm in communicators:
            if comm.spec is not None:
                index = registry.add(comm.reference(), comm.spec.capacity[0])
                native_file.self_test(native, registry, index, comm.reference(), comm.spec)
    except (RuntimeError, UBUnsupportedError) as error:
        reason = str(error)
    reason = _any_reason(group, reason)
    return (None, reason) if reason else (registry, "")


def _any_reason(group: Group, reason: str) -> str:
    reasons = group.allgather(reason, "agreeing on the native file")
    return next((f"rank {rank}: {text}" for rank, text in zip(group.members, reasons, strict=True) if text), "")


def _log(backend: TEBackend) -> None:
    if backend.specs:
        logger.info("follow the active shape: %s", ", ".join(backend.specs))
    for reason in sorted(set(backend.skipped.values())):
        names = ", ".join(name for name, why in backend.skipped.items() if why == reason)
        what = "take T from their operands" if reason == CUBLASMP else "stay at capacity"
        logger.log(logging.WARNING if backend.capacity_only else logging.INFO, "%s: %s: %s", what, names, reason)
