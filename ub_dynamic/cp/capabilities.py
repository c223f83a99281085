# SPDX-License-Identifier: Apache-2.0
"""What the installed Transformer Engine can do with packed sequences under context parallelism, found by probing."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import te_patches


@dataclass(frozen=True)
class Capabilities:
    """``te``: TE's version, None where it is not installed. ``thd_*``: whether packed sequences are taken with that
    communication type. ``no_load_balance``: TE's contiguous split of the whole buffer. ``patches``: whether
    :func:`~ub_dynamic.cp.te_patches.te_backward_patches` finds all that it patches. ``flash``: installed FlashAttention
    generations, of 2, 3 and 4."""

    te: str | None = None
    thd_p2p: bool = False
    thd_a2a: bool = False
    thd_all_gather: bool = False
    thd_a2a_p2p: bool = False
    no_load_balance: bool = False
    patches: bool = False
    flash: tuple[int, ...] = ()

    def takes(self, comm_type: str) -> bool:
        """Whether TE takes packed sequences with ``comm_type``, one of TE's names."""
        return bool(getattr(self, f"thd_{comm_type.replace('+', '_')}"))


@functools.cache
def te_capabilities() -> Capabilities:
    """Probe the installed TE, once; nothing is loaded onto a device."""
    try:
        import transformer_engine
        from transformer_engine.pytorch.attention.dot_product_attention import context_parallel, utils
    except ImportError:
        return Capabilities()
    return describe(context_parallel, utils.FlashAttentionUtils, str(transformer_engine.__version__))


def describe(module: Any, flash: Any, version: str) -> Capabilities:
    """The capabilities behind TE's module ``context_parallel`` and its ``FlashAttentionUtils``."""
    all_to_all = _parameters(getattr(module, "flash_attn_a2a_communicate", None))
    gather = getattr(module, "AttnFuncWithCPAndKVAllGather", None)
    has_a2a = any(name.startswith("cu_seqlens") for name in all_to_all)
    return Capabilities(
        te=version,
        thd_p2p=hasattr(module, "AttnFuncWithCPAndKVP2P"),
        thd_a2a=has_a2a,
        thd_all_gather="cu_seqlens_kv_padded" in _parameters(getattr(gather, "forward", None)),
        thd_a2a_p2p=has_a2a and not refuses_hierarchical(_source(getattr(module, "attn_forward_func_with_cp", None))),
        no_load_balance=hasattr(module, "get_no_load_balance_thd_causal_metadata"),
        patches=not te_patches.probe(module),
        flash=tuple(
            generation
            for generation, name in ((2, "is_installed"), (3, "v3_is_installed"), (4, "v4_is_installed"))
            if getattr(flash, name, False)
        ),
    )


def refuses_hierarchical(source: str) -> bool:
    """Whether TE's entry function, by its source, asserts packed sequences out of a2a+p2p.

    TE before 2.19 does (issue #2208). Without a source the answer is yes.
    """
    return not source or re.search(r"qkv_format\}? format is not supported with hierarchical", source) is not None


def _parameters(function: Callable[..., Any] | None) -> tuple[str, ...]:
    try:
        return () if function is None else tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _source(function: Callable[..., Any] | None) -> str:
    try:
        return "" if function is None else inspect.getsource(function)
    except (OSError, TypeError):
        return ""
