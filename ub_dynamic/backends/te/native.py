# SPDX-License-Identifier: Apache-2.0
"""Loads the native file and checks it against the communicators of the installed TE before it is trusted."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

from ...errors import UBUnsupportedError
from ...rules import token_rule
from ...shapes import ChunkLayout, CommSpec
from . import build

_NAME = f"{__package__}.{build.MODULE}"


def load() -> ModuleType:
    """The native module, compiled if need be. :class:`UBUnsupportedError` says what to install.

    Transformer Engine must be imported before: its library provides the functions that the module calls.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    path = build.build()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UBUnsupportedError(f"{path} does not load with {versions()}: {error}") from error
    sys.modules[_NAME] = module
    return module


def versions() -> str:
    """The versions that the native file depends on, for error texts."""
    te, _ = build.find_te()
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Transformer Engine {te}, torch {torch.__version__}, Python {python}"


def self_test(native: ModuleType, registry: Any, index: int, communicator: Any, spec: CommSpec) -> None:
    """Compare what the native file reads and writes with what TE itself answers, for one communicator.

    The shape is read at capacity, rewritten to the smallest valid T, and restored. Raises
    :class:`UBUnsupportedError` naming the versions where anything differs; the shape is restored then too.
    """
    try:
        _compare(native, communicator, spec.layout(spec.capacity[0]), spec)
        rule = token_rule(spec)
        if rule.minimum < spec.capacity[0] and rule.accepts(rule.minimum):
            try:
                registry.apply_one(index, rule.minimum)
                _compare(native, communicator, spec.layout(rule.minimum), spec)
                _refuses_capacity(communicator, spec)
            finally:
                registry.apply_one(index, spec.capacity[0])
            _compare(native, communicator, spec.layout(spec.capacity[0]), spec)
    except (_Mismatch, RuntimeError) as error:
        raise UBUnsupportedError(
            f"the communicators of {versions()} are not what this package knows: {spec.name}: {error}. "
            "TE overlap at a fixed capacity keeps working"
        ) from error


class _Mismatch(Exception):
    pass


def _compare(native: ModuleType, communicator: Any, layout: ChunkLayout, spec: CommSpec) -> None:
    facts = native.inspect(communicator)
    whole = communicator.get_buffer(shape=list(layout.view_shape))
    base = facts["data_ptr"]
    _same("shape", facts["shape"], layout.view_shape)
    _same("dtype", getattr(torch, facts["dtype"], facts["dtype"]), spec.dtype)
    _same("dtype of get_buffer", whole.dtype, spec.dtype)
    _same("address of get_buffer", whole.data_ptr(), base)
    _same("shape of get_buffer", tuple(communicator.get_buffer().shape), layout.view_shape)
    _same("tp", facts["tp_size"], spec.tp)
    if facts["is_p2p"]:
        wanted = tuple((base + chunk.offset_bytes, chunk.rows, chunk.columns) for chunk in layout.chunks)
        _same("chunks", facts["chunks"], wanted)
    local = communicator.get_buffer(local_chunk=True, shape=[layout.active[0] // spec.tp, spec.capacity[1]])
    offset = facts["tp_id"] * layout.local_numel * spec.dtype.itemsize
    _same("address of the local chunk", local.data_ptr(), base + offset)


def _refuses_capacity(communicator: Any, spec: CommSpec) -> None:
    rows = spec.layout(spec.capacity[0]).view_shape
    try:
        communicator.get_buffer(shape=list(rows))
    except RuntimeError:
        return
    raise _Mismatch(f"get_buffer still takes {list(rows)} after the shape was rewritten")


def _same(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise _Mismatch(f"{what} is {got}, expected {wanted}")
