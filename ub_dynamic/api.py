# SPDX-License-Identifier: Apache-2.0
"""The process-wide manager behind TE's own names: ``initialize_ub``, ``set_ub_active_shape`` and the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch

from .agreement import PolicyArgument, agree, check_defaults, check_group_arguments
from .backends.protocol import Alternatives, Backend
from .board import RankBoard
from .errors import UBStateError, UBUnsupportedError
from .groups import Group, TorchGroup, tensor_parallel_group
from .manager import Check, Manager
from .readiness import Readiness
from .reports import ShapeReport
from .scopes import Microbatch
from .shapes import Shape

Output = TypeVar("Output")
BackendName = Literal["auto", "te", "host"]

_manager: Manager | None = None
_group: Group | None = None


def initialize_ub(
    shape: Iterable[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
    *,
    backend: BackendName = "auto",
    tp_group: Any = None,
    check: Check = "deferred",
    guard: bool = True,
    auto: bool = False,
    timeout: float | None = None,
    policy: PolicyArgument = None,
) -> Manager:
    """Register the communicators of tensor-parallel overlap once, at capacity ``shape`` = ``[T_cap, H]``.

    The positional arguments are those of ``transformer_engine.pytorch.initialize_ub``. ``backend``: ``"te"``
    for Transformer Engine's UserBuffers on GPUs, ``"host"`` for CPU communicators, ``"auto"`` takes TE where
    CUDA and TE are, else the host. ``tp_group``: an mpi4py communicator or torch.distributed process group of
    ``tp_size`` ranks; by default contiguous ranks, which is all that TE has. ``check``, ``guard``, ``auto``: see
    :class:`~ub_dynamic.manager.Manager`. ``timeout``: seconds that a strict check, or the host backend, waits
    for a rank (default: environment variable ``UB_DYNAMIC_TIMEOUT``, or 20). ``policy``: which overlap each GEMM uses
    at which T. None or ``"always"``: as ``ub_cfgs`` configures it, at every T; a path or
    :class:`~ub_dynamic.tuning_table.TuningTable`: as measured; a callable ``(gemm, tokens)`` that returns an
    :class:`~ub_dynamic.overlap.OverlapConfig` or None (as configured), asked once for every valid T, here; or a
    :class:`~ub_dynamic.policy.Policy`. It is the same on all ranks; with TE it excludes ``auto``. Where it chooses
    ``"none"``, ``guard=False`` lets operands of another T pass: a plain collective takes its rows from the operand,
    so the result is right, and only the guard could tell that another T was meant.

    Every rank calls it. Raises :class:`UBStateError` if it is initialised already, the :class:`UBShapeError`
    family for a capacity that some communicator could not take, :class:`UBUnsupportedError` with what to
    install otherwise. After an error everything is as before the call.
    """
    global _manager, _group
    if _manager is not None:
        raise UBStateError("UserBuffers are already initialised; call destroy_ub first")
    te = choose_backend(backend) == "te"
    if not te and (use_fp8 or quantization_modes or with_cublasmp):
        raise UBUnsupportedError("the host backend takes float32 and bfloat16; FP8 modes and cuBLASMp need TE")
    if te and not torch.distributed.is_initialized():
        raise UBStateError("TE's UserBuffers need torch.distributed: call torch.distributed.init_process_group first")
    check_group_arguments(tp_size, tp_group)
    group = tensor_parallel_group(tp_size, None if te else tp_group, "gloo" if te else bootstrap_backend)
    made: Backend | None = None
    world = group.world if te and isinstance(group, TorchGroup) else None
    try:
        options = {"dtype": dtype, "ub_cfgs": ub_cfgs, "quantization_modes": quantization_modes, "check": check}
        tes = {"use_fp8": use_fp8 or None, "with_cublasmp": with_cublasmp or None}
        asked = {**options, **tes, "bootstrap_backend": bootstrap_backend, "auto": auto, "timeout": timeout}
        with Readiness(world) as ready:
            capacity, chosen = agree(group, shape, tp_size, te, asked, policy, tp_group)
            alternatives = None if chosen is None else chosen.configurations()
            board = RankBoard(group, timeout_s=timeout) if check != "never" and group.size > 1 else None
            if te:
                te_arguments = (use_fp8, quantization_modes, dtype, ub_cfgs, bootstrap_backend, with_cublasmp)
                made = _create_te(capacity, tp_size, *te_arguments, group, board, alternatives, ready.confirm)
                _te_names().hold(_destroy_te)
            else:
                made = _create_host(capacity, tp_size, dtype, ub_cfgs, group, board, timeout, alternatives)
        _manager = Manager(
            made, capacity, board=board, check=check, guard=guard, auto=auto, timeout_s=timeout, policy=chosen
        )
    except BaseException:
        if made is not None:
            _end(made, made.destroy)
        group.close()
        raise
    _group = group
    return _manager


def choose_backend(backend: BackendName) -> Literal["te", "host"]:
    """``"auto"`` resolved: TE where CUDA and TE are, else the host."""
    if backend == "auto":
        return "te" if torch.cuda.is_available() and find_spec("transformer_engine") else "host"
    if backend not in ("te", "host"):
        raise UBUnsupportedError(f'backend = {backend!r}: it is "auto", "te" or "host"')
    return backend


def _create_host(
    capacity: Shape,
    tp_size: int,
    dtype: torch.dtype,
    ub_cfgs: Any,
    group: Group,
    board: RankBoard | None,
    timeout_s: float | None,
    alternatives: Alternatives | None,
) -> Backend:
    from .backends.host import create_host_backend

    return create_host_backend(capacity, tp_size, dtype, ub_cfgs, group, board, timeout_s, alternatives)


def _create_te(*args: Any) -> Backend:
    from .backends.te import create_te_backend

    return create_te_backend(*args)


def _te_names() -> ModuleType:
    from .backends.te import install

    return install


def install(
    *, check: Check = "deferred", guard: bool = True, auto: bool = False, policy: PolicyArgument = None
) -> None:
    """Put this package behind Transformer Engine's own names, so that a training script need not change.

    ``te.initialize_ub``, ``te.module.initialize_ub`` and ``te.module.base.initialize_ub`` (and ``destroy_ub``) become
    this package's; ``te.set_ub_active_shape`` and the per-communicator methods of TE issue #3564 are added. The
    arguments are the defaults of the ``initialize_ub`` calls to come, in which a ``policy`` that is a path is read. A
    second call changes only these. Communicators that TE made before, without this package, remain TE's:
    ``te.destroy_ub`` destroys them as it did.

    Raises :class:`UBUnsupportedError` for a TE that lacks what would be replaced, and what ``initialize_ub`` raises for
    these arguments; nothing is changed then.
    """
    check_defaults(check, auto, policy)
    options: dict[str, Any] = {"check": check, "guard": guard, "auto": auto, "policy": policy}
    _te_names().install(
        initialize_ub=functools.partial(initialize_ub, backend="te", **options),
        destroy_ub=_destroy_te,
        set_ub_active_shape=set_ub_active_shape,
        set_buffer_active_shape=set_buffer_active_shape,
        get_buffer_active_shape=get_buffer_active_shape,
        get_buffer_capacity_shape=get_buffer_capacity_shape,
    )


def uninstall() -> list[str]:
    """Give Transformer Engine its names back; returns those that somebody else has replaced since :func:`install`.

    While TE's communicators of an :func:`initialize_ub` live, ``te.destroy_ub`` remains :func:`destroy_ub`.
    """
    left: list[str] = _te_names().uninstall()
    return left


def manager() -> Manager:
    """The process-wide manager; :class:`UBStateError` before :func:`initialize_ub` and after :func:`destroy_ub`."""
    if _manager is None:
        raise UBStateError("UserBuffers are not initialised: call initialize_ub first")
    return _manager


def is_ub_initialized() -> bool:
    """Whether :func:`initialize_ub` was called and :func:`destroy_ub` was not."""
    return _manager is not None


def destroy_ub() -> None:
    """Release all communicators, on all ranks together. A second call does nothing."""
    global _manager, _group
    if _manager is None:
        return
    ending, group = _manager, _group
    _manager = _group = None
    _end(ending.backend, ending.destroy)
    if group is not None:
        group.close()  # not after an error: messages may still be under way in it


def _end(backend: Backend, destroy: Callable[[], None]) -> None:
    """Destroy, and give TE its ``destroy_ub`` back."""
    try:
        destroy()
    finally:
        if backend.name == "te":
            _te_names().release()


def _destroy_te() -> bool:
    """What TE's ``destroy_ub`` calls: release TE's communicators if they are this package's; whether they were."""
    if _manager is None or _manager.backend.name != "te":
        return False
    destroy_ub()
    return True


def set_ub_active_shape(shape: Iterable[int], *, names: Iterable[str] | None = None) -> ShapeReport:
    """Make ``shape`` = ``[T, H]`` the active shape: see :meth:`Manager.set_active_shape`."""
    if _manager is None:
        manager()
    return _manager.set_active_shape(shape, names)  # type: ignore[union-attr]


def reset_ub_active_shape() -> ShapeReport:
    """Back to capacity."""
    return manager().reset_active_shape()


def get_ub_active_shape() -> Shape:
    """The active shape ``(T, H)``."""
    return manager().active


def get_ub_capacity_shape() -> Shape:
    """The registered shape ``(T_cap, H)``."""
    return manager().capacity


def active_shape(shape: Iterable[int]) -> AbstractContextManager[ShapeReport]:
    """``with active_shape([T, H]):`` see :meth:`Manager.active_shape`."""
    return manager().active_shape(shape)


def microbatch(batch: Any) -> AbstractContextManager[Microbatch]:
    """``with microbatch(batch_or_T) as mb:`` see :meth:`Manager.microbatch`."""
    return manager().microbatch(batch)


def bind_backward(output: Output, shape: Iterable[int]) -> Output:
    """Set ``shape`` when the backward of ``output`` starts: see :meth:`Manager.bind_backward`."""
    return manager().bind_backward(output, shape)


def token_multiple() -> int:
    """T must be a multiple of this."""
    return manager().token_multiple()


def round_up_tokens(tokens: int) -> int:
    """The smallest valid T that holds ``tokens``."""
    return manager().round_up_tokens(tokens)


def max_tokens() -> int:
    """The largest valid T."""
    return manager().max_tokens()


def set_buffer_active_shape(communicator: Any, shape: Iterable[int]) -> None:
    """One communicator, by object or by name: see :meth:`Manager.set_buffer_active_shape`."""
    manager().set_buffer_active_shape(_name_of(communicator), shape)


def get_buffer_active_shape(communicator: Any) -> Shape:
    """The active shape ``(T, H)`` of one communicator, by object or by name."""
    return manager().buffer_active_shape(_name_of(communicator))


def get_buffer_capacity_shape(communicator: Any) -> Shape:
    """The registered shape ``(T_cap, H)`` of one communicator, by object or by name."""
    manager().buffer_active_shape(_name_of(communicator))
    return manager().capacity


def _name_of(communicator: Any) -> str:
    if isinstance(communicator, str):
        return communicator
    name = manager().backend.find(communicator)
    if name is None:
        raise UBStateError(f"{communicator!r} is no communicator of this initialize_ub")
    return name
