# SPDX-License-Identifier: Apache-2.0
"""Put the padding flag into calls of TE's attention modules, by a pre-hook or a wrapped class; both reversible."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UBUnsupportedError
from .pad_flag import PadResolver, Policy

_FLAG = "pad_between_seqs"
_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class PadHandle:
    """An installed resolver. ``installed``: names of the modules or of the class; ``resolver``: its memory."""

    def __init__(self, resolver: PadResolver, installed: tuple[str, ...], undo: list[Callable[[], None]]) -> None:
        self.resolver, self.installed, self._undo = resolver, installed, undo

    def remove(self) -> None:
        """Take everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        self.resolver.forget()

    def __enter__(self) -> PadHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def install_pad_resolver(target: torch.nn.Module | type[torch.nn.Module], policy: Policy = "conservative") -> PadHandle:
    """Fill in ``pad_between_seqs`` wherever it is left None in calls of TE's attention.

    ``target``: a module, in which every ``te.DotProductAttention`` and ``te.MultiheadAttention`` gets a forward
    pre-hook (not the backends inside, which are told the flag); or one of these classes, whose ``forward`` is wrapped,
    for instances and subclasses that call it (as Megatron's do). ``MultiheadAttention`` needs it too: its rotary
    embedding takes padded boundaries only where the flag is True, and None counts as False. Where a batch is known,
    T is checked against the module's context-parallel group as it is at the call. Raises :class:`UBUnsupportedError`
    where nothing decides the flag.
    """
    resolver = PadResolver(policy)
    if isinstance(target, type):
        return PadHandle(resolver, (target.__name__,), [_wrap(target, resolver)])
    found: dict[str, torch.nn.Module] = {}
    for name, module in target.named_modules():
        if _decides_flag(type(module).forward):
            found[name or type(module).__name__] = module
            continue
        parent = next((base for base in type(module).__mro__ if _decides_flag(base.__dict__.get("forward"))), None)
        if parent is not None:
            raise UBUnsupportedError(
                f"{type(module).__name__} {name!r} overrides {parent.__name__}.forward without {_FLAG}, so a hook "
                f"on it would not see the call: install_pad_resolver({parent.__name__}) does"
            )
    if not found:
        raise UBUnsupportedError(f"no module in {type(target).__name__} decides {_FLAG}: TE's attention modules do")
    hooks = [
        module.register_forward_pre_hook(_pre_hook(module, resolver), with_kwargs=True) for module in found.values()
    ]
    return PadHandle(resolver, tuple(found), [hook.remove for hook in hooks])


def _wrap(target: type[torch.nn.Module], resolver: PadResolver) -> Callable[[], None]:
    original = target.__dict__.get("forward")
    if original is None or not _decides_flag(original):
        raise UBUnsupportedError(f"{target.__name__}.forward does not decide {_FLAG}: TE's attention modules do")
    fill = _Filler(original, resolver)

    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = fill(self, args, kwargs)
        return original(self, *args, **kwargs)

    target.forward = forward

    def undo() -> None:
        if target.__dict__.get("forward") is not forward:
            raise UBUnsupportedError(
                f"{target.__name__}.forward was replaced after install_pad_resolver: take that back first"
            )
        target.forward = original

    return undo


def _pre_hook(module: torch.nn.Module, resolver: PadResolver) -> Callable[..., Any]:
    fill = _Filler(type(module).forward, resolver)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fill(module, args, kwargs)

    return hook


class _Filler:
    """Finds a call's arguments by position or name, and puts the flag where it belongs."""

    def __init__(self, forward: Callable[..., Any], resolver: PadResolver) -> None:
        names = list(inspect.signature(forward).parameters)[1:]  # without self
        self._places = {name: place for place, name in enumerate(names)}
        self._resolver = resolver

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def given(name: str) -> Any:
            place = self._places.get(name, len(args))
            return args[place] if place < len(args) else kwargs.get(name)

        q, kv, q_padded, kv_padded = (given(name) for name in _BOUNDARIES)
        verdict = self._resolver.resolve(
            (q, kv, q_padded, kv_padded),
            explicit=given(_FLAG),
            qkv_format=given("qkv_format") or getattr(module, "qkv_format", "thd"),
            rows=_packed_rows(module, given("query_layer") if given("qkv_layer") is None else given("qkv_layer")),
        )
        place = self._places[_FLAG]
        if place < len(args):
            return (*args[:place], verdict.pad_between_seqs, *args[place + 1 :]), kwargs
        return args, {**kwargs, _FLAG: verdict.pad_between_seqs}


def _packed_rows(module: torch.nn.Module, query: Any) -> int | None:
    """T over all context-parallel ranks, from the rows of the query; None for a module without one."""
    if not isinstance(query, torch.Tensor):
        return None
    groups = getattr(module, "cp_group", None)
    if groups is None:
        return query.shape[0]
    rows = query.shape[0]
    for group in groups if isinstance(groups, list) else [groups]:
        rows *= group.size()
    return rows


def _decides_flag(forward: Any) -> bool:
    """Whether None may reach ``forward`` as the flag. TE's backends are told it by their caller, and their group."""
    if not callable(forward):
        return False
    names = set(inspect.signature(forward).parameters)
    return {_FLAG, *_BOUNDARIES} <= names and "cp_group" not in names
