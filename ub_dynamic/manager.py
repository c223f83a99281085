# SPDX-License-Identifier: Apache-2.0
"""One capacity, one active shape, many communicators: validate all, then apply all, or change nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from .backends.protocol import Backend
from .batches import tensors_of, tokens_of
from .board import RankBoard
from .errors import UBShapeError, UBStateError, UBUnsupportedError
from .policy import Policy
from .reports import ShapeReport
from .rules import check_tokens
from .scopes import Microbatch, Scope
from .seconds import check_seconds
from .shapes import Shape, parse_tokens
from .stages import Stages
from .valid_shapes import ValidShapes

Check = Literal["deferred", "strict", "never"]
Output = TypeVar("Output")


class Manager:
    """The active shape of one process.

    ``capacity``: ``(T_cap, H)``, registered once. ``check``: how TP ranks are compared, ``"deferred"``
    (never waits), ``"strict"`` (waits for every rank at each change) or ``"never"``. ``guard``: an operand
    whose rows differ from the active shape raises before it is enqueued. ``auto``: such an operand sets the
    active shape instead, so that no call is needed at all. ``policy``: which overlap each GEMM uses at which T, as
    :meth:`use_policy` takes it; without one they stay as the backend was configured.
    """

    def __init__(
        self,
        backend: Backend,
        capacity: Shape,
        *,
        board: RankBoard | None = None,
        check: Check = "deferred",
        guard: bool = True,
        auto: bool = False,
        timeout_s: float | None = None,
        policy: Policy | None = None,
    ) -> None:
        check_arguments(check, timeout_s)
        if check != "never" and board is None and backend.tp > 1:
            raise UBStateError(f"check = {check!r} compares TP ranks on a rank board, and there is none")
        self.backend = backend
        self.capacity = capacity
        self.check: Check = check
        self.guard, self.auto = guard, auto
        self._board = None if check == "never" else board
        self._strict = self._every_call = check == "strict"
        self._timeout_s = timeout_s
        self._shapes = ValidShapes(backend.specs, capacity, backend.tp, backend.capacity_only)
        self._hidden = capacity[1]
        self._tokens = capacity[0]
        self.shape_changes = 0  # how often the active shape of all communicators changed
        self._single: dict[str, int] = {}  # communicators set apart from the others
        self._lock = threading.RLock()
        self._updated = tuple(backend.specs)
        self._skipped = MappingProxyType(dict(backend.skipped))
        if self._board is not None:
            self._board.name_communicators(self._updated, capacity[0])
        self.destroyed = False  # by destroy: there are no communicators any more
        fast = (guard or auto) and not self._strict  # it asks the guard what is under way
        self._ready = backend.make_ready(self._shapes.rule, self._board) if fast else None
        self._stages = Stages(backend, policy)
        if policy is not None:
            self._stages.stand(self._tokens)
        if guard or auto:
            backend.connect(self._on_operand)

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def active(self) -> Shape:
        """The active shape ``(T, H)``."""
        return self._tokens, self._hidden

    @property
    def policy(self) -> Policy | None:
        """Which overlap each GEMM uses at which T; None: as configured."""
        return self._stages.policy

    def buffer_active_shape(self, name: str) -> Shape:
        """The active shape ``(T, H)`` of one communicator; of one in ``skipped``, which has none, its capacity.

        With cuBLASMp all are skipped: their overlaps take T from the operands, whatever the active shape.
        """
        if name in self._skipped:
            return self.capacity
        self._spec(name)
        return self._single.get(name, self._tokens), self._hidden

    def token_multiple(self) -> int:
        """T must be a multiple of this: ``tp`` for every usual H, the capacity where nothing else is possible."""
        return self._shapes.rule.multiple

    def round_up_tokens(self, tokens: int) -> int:
        """The smallest valid T that holds ``tokens``; :class:`UBCapacityError` beyond :meth:`max_tokens`."""
        return self._shapes.rule.round_up(parse_tokens(tokens))

    def max_tokens(self) -> int:
        """The largest valid T."""
        return self._shapes.rule.maximum

    def check_shape(self, shape: Any) -> Shape:
        """``shape`` as ``(T, H)`` if every communicator takes it; raises what :meth:`set_active_shape` raises."""
        tokens, hidden = self._shapes.parse(shape)
        self._shapes.check(tokens)
        return tokens, hidden

    # -- changing --------------------------------------------------------------------------------------------

    def set_active_shape(self, shape: Iterable[int], names: Iterable[str] | None = None) -> ShapeReport:
        """Make ``shape`` = ``[T, H]`` the active shape of every communicator (or of those named).

        Host only: no device call, no allocation, no synchronisation. The same shape again returns at once,
        except with ``check="strict"``, which compares every call. T belongs to the process, not to a thread.

        Raises :class:`UBShapeError`, :class:`UBCapacityError` or :class:`UBAlignmentError` for a shape that some
        communicator could not take, :class:`UBUnsupportedError` with the reason where all of them stay at capacity,
        :class:`UBStateError` during capture, in the middle of an overlap or after :meth:`destroy`,
        :class:`UBRankMismatchError` where the TP ranks disagree. Nothing is changed then.
        """
        # The usual case first, two plain ints; everything else takes the long way, or is refused there.
        tokens, hidden = shape if type(shape) in _PLAIN and len(shape) == 2 else (None, None)  # type: ignore[arg-type]
        if type(tokens) is not int or type(hidden) is not int or hidden != self._hidden:
            tokens, hidden = self._shapes.parse(shape)
        if names is not None:
            return self._set_named(tokens, names)
        with self._lock:
            if tokens != self._tokens or self._single or self._every_call:
                self._change(tokens)
        return _new_report(ShapeReport, ((tokens, hidden), self._updated, self._skipped, self._stages.choices))

    def reset_active_shape(self) -> ShapeReport:
        """Back to capacity."""
        return self.set_active_shape(self.capacity)

    def set_buffer_active_shape(self, name: str, shape: Iterable[int]) -> None:
        """Give one communicator another active shape than the others; :meth:`set_active_shape` ends that.

        Raises what :meth:`set_active_shape` raises, and :class:`UBUnsupportedError` with the reason for a
        communicator that is skipped.
        """
        tokens, _ = self._shapes.parse(shape)
        self._set_named(tokens, [name])

    def use_policy(self, policy: Policy | None) -> None:
        """Choose by ``policy`` from now on, beginning with what it names for the present T; None: as configured.

        Host only; the active shape stays. It takes configurations that ``initialize_ub`` made communicators for, those
        of the policy given there. Every TP rank calls it at the same point with the same policy: the ranks compare
        T, not policies. With TE a layer overlaps only if it was built to. Call it between steps: a backward whose
        forward ran under another policy is refused where it would overlap in another way.

        Raises :class:`UBUnsupportedError` or :class:`UBShapeError` with the reason for a policy that the backend
        cannot follow, :class:`UBStateError` during capture, in the middle of an overlap or after :meth:`destroy`.
        Nothing is changed then.
        """
        if self.destroyed:
            raise UBStateError("use_policy after destroy: there are no communicators any more")
        if policy is not None and self.auto and (reason := self.backend.auto_excludes_policy):
            raise UBUnsupportedError(reason)
        stages = Stages(self.backend, policy)
        with self._lock:
            if busy := self.backend.busy():
                raise UBStateError(f"the policy cannot change now: {busy}")
            stages.take_over(self._stages, self._tokens)
            self._stages = stages

    def active_shape(self, shape: Iterable[int]) -> Scope[ShapeReport]:
        """``with active_shape([T, H]):`` restores the previous shapes at the end, after exceptions too: that of all
        communicators, and those that :meth:`set_buffer_active_shape` gave to single ones."""
        return Scope(self, shape)

    def standing_shapes(self) -> tuple[Shape, Mapping[str, int]]:
        """What :meth:`restore_shapes` restores: the active shape, and T of each single communicator."""
        return (self._tokens, self._hidden), dict(self._single) if self._single else _NONE

    def restore_shapes(self, shape: Shape, single: Mapping[str, int], given_up: bool = False) -> None:
        """Back to what :meth:`standing_shapes` said; after :meth:`destroy` there is nothing to restore.

        ``given_up``: an exception ended what was under way, so that no filled buffer waits for its GEMM any more.
        """
        if self.destroyed:
            return
        if given_up:
            self.backend.give_up()
        self.set_active_shape(shape)
        for name, tokens in single.items():
            self._set_named(tokens, [name])

    def microbatch(self, batch: Any) -> Scope[Microbatch]:
        """The active shape of one microbatch, in its forward and in its backward.

        ``batch``: T, or a :class:`~ub_dynamic.packing.PackedBatch` (:func:`~ub_dynamic.batches.tokens_of` says which
        T). Pipeline schedules run forward i + 1 before backward i, so bind the output::

            with manager.microbatch(batch) as mb:
                loss = mb.bind_backward(model(tokens))
            loss.backward()  # at any later time, whatever the active shape is by then
        """
        tokens = tokens_of(batch)
        if not hasattr(tokens, "__index__"):
            raise UBShapeError(
                "microbatch takes a number of tokens T, or a PackedBatch (anything with local_tokens or total_tokens), "
                f"not {tokens!r}"
            )
        if type(tokens) is not int:
            tokens = parse_tokens(tokens)
        handle = Microbatch(self, self.check_shape((tokens, self._hidden)))
        return Scope(self, handle.shape, handle)

    def bind_backward(self, output: Output, shape: Iterable[int]) -> Output:
        """Set ``shape`` when the backward of ``output`` starts; returns ``output`` itself, not a view of it.

        A pre-hook on the autograd node keeps the tensor what it is: an identity autograd Function would return
        a view, which Megatron's pipeline schedules refuse to deallocate. Recomputation runs inside that backward
        and sees the shape too, and the shape stays until the next change. Tensors without a gradient are left
        alone. Raises :class:`UBStateError` where ``output`` holds no tensor that could be found, or contains itself.
        """
        checked = self.check_shape(shape)
        tensors = list(tensors_of(output))
        if not tensors:
            raise UBStateError(
                f"bind_backward found no tensor in {type(output).__name__}; pass a tensor, or tensors in a list, "
                "tuple, dict or dataclass"
            )

        def set_shape(_: object) -> None:
            self.set_active_shape(checked)

        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(set_shape)
        return output

    def destroy(self) -> None:
        """Release the communicators, on all ranks together; a disagreement that nobody saw yet is raised at the end.

        A second call does nothing.
        """
        if self.destroyed:
            return
        self.destroyed = self._every_call = True
        self._ready = None
        self.backend.connect(None)
        try:
            if self._board is not None:
                self._board.final_check()
        finally:
            self.backend.destroy()

    # -- inside ----------------------------------------------------------------------------------------------

    def _change(self, tokens: int) -> None:
        ready = self._ready(tokens) if self._ready is not None else False
        if ready is False:
            self._prepare(tokens)
        elif ready is None and self._board is not None:  # published, and another rank differs
            self._board.check()
        if self._stages.policy is not None:
            self._stages.follow(tokens)
        self.backend.apply(tokens)
        self.shape_changes += tokens != self._tokens
        self._tokens = tokens
        if self._single:
            self._single = {}

    def _prepare(self, tokens: int) -> None:
        """What comes before a change: it is valid, nothing is in its way, and the other ranks hear of it."""
        self._shapes.check(tokens)
        self._check_free(tokens)
        self._compare(tokens)

    def _check_free(self, tokens: int) -> None:
        why = "after destroy there are no communicators any more" if self.destroyed else self.backend.busy()
        if why:
            raise UBStateError(f"the active shape cannot change to T = {tokens} now: {why}")

    def _set_named(self, tokens: int, names: Iterable[str]) -> ShapeReport:
        chosen = tuple(dict.fromkeys(self._with_alternatives((names,) if isinstance(names, str) else names)))
        for name in chosen:
            check_tokens(self._spec(name), tokens)
        with self._lock:
            self._check_free(tokens)
            for name in chosen:
                self._compare(tokens, self._updated.index(name) + 1)
            for name in chosen:
                self.backend.apply_one(name, tokens)
                self._single[name] = tokens
        return ShapeReport((tokens, self._hidden), chosen, self._skipped, self._stages.choices)

    def _with_alternatives(self, names: Iterable[str]) -> Iterator[str]:
        """A GEMM's communicators of every method: whichever stands there by a policy, it has this shape."""
        for name in names:
            yield name
            yield from (other for other in self._updated if other.startswith(f"{name} ("))

    def _compare(self, tokens: int, communicator: int = 0) -> None:
        """Tell the other ranks of a change, and compare; before it is made, so that a refused one changes nothing."""
        if self._board is None:
            return
        if self._strict:
            self._board.publish(tokens, communicator)
            self._board.wait_for_all(self._timeout_s)
        else:
            self._board.exchange(tokens, communicator)

    def _spec(self, name: str) -> Any:
        if name in self._skipped:
            raise UBUnsupportedError(
                f"communicator {name} has no active shape, its capacity is {list(self.capacity)}: {self._skipped[name]}"
            )
        try:
            return self.backend.specs[name]
        except KeyError:
            raise UBStateError(f"no communicator {name!r}; known are {', '.join(self.backend.specs)}") from None

    def _on_operand(self, name: str, tokens: int) -> None:
        expected = self._single.get(name, self._tokens) if self._single else self._tokens
        if tokens == expected:
            return
        if self.auto:
            self.set_active_shape((tokens, self._hidden))
            return
        raise UBShapeError(
            f"{name}: the microbatch has {tokens} tokens, the active shape is {expected} tokens; "
            f"call set_ub_active_shape([{tokens}, {self._hidden}]) first; if this is a backward, bind it to its T with "
            "microbatch(...) and bind_backward"
        )


def check_arguments(check: Any, timeout_s: Any) -> None:
    """Raise :class:`UBStateError` for a kind of check, or a time to wait, that there is none of."""
    if check not in ("deferred", "strict", "never"):
        raise UBStateError(f'check = {check!r}: it is "deferred", "strict" or "never"')
    if timeout_s is not None:
        check_seconds("timeout", timeout_s)


_PLAIN = (list, tuple)
_NONE: Mapping[str, int] = MappingProxyType({})
_new_report = tuple.__new__  # a third of the time of ShapeReport(...)
