# SPDX-License-Identifier: Apache-2.0
"""Fewer launches and no host synchronisation in TE's ring attention (THD, p2p and a2a+p2p).

TE derives boundaries and padding masks on the device in every step of every layer, cleans up padding that need not be
there, and with FlashAttention reads boundaries back to the host. Results stay the same, bit for bit, but for gradients
that TE leaves undefined for short sequences. What is replaced are names that ``context_parallel.py`` looks up at call
time; each is probed, and put back.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import UBStateError, UBUnsupportedError
from . import te_ring

_RING = "AttnFuncWithCPAndKVP2P"


def te_backward_patches(
    *, skip_zero: bool = True, no_sync: bool = True, reuse: bool = True, skip_unseen: bool = True
) -> TEPatches:
    """Patches of TE's ring attention, to be used as a context manager or with ``install`` and ``remove``.

    ``skip_zero``: the backward leaves out the clean-up of padding where the batch has none, does it with one mask a
    microbatch where it has, and stands tails of which nothing is known. ``no_sync``: the FlashAttention
    backward does not read boundaries back. ``reuse``: boundaries of ring steps are made once a microbatch, the
    second halves of q, out and dout read once a layer, and the first ones of k and v together. ``skip_unseen``: in ring
    steps where a sequence has keys but no queries, it has no keys; else cuDNN on Hopper leaves anything in dk and dv,
    also of real tokens, of a sequence whose last of ``2*ring`` chunks is all padding (TE issue #2186). That costs no
    launch where the batch is known, six small ones a step during capture or where it is not.

    What a batch holds is known inside ``with packed(batch)``, or where its own boundary tensors are passed; a backward
    goes by its own forward, so batches may alternate. Where TE's names or parameters differ, what depends on them stays
    as it was, with one warning.
    """
    return TEPatches(skip_zero, no_sync, reuse, skip_unseen)


class TEPatches:
    """See :func:`te_backward_patches`. ``active``: what was patched; ``refused``: the other names, with the reason."""

    _installed: TEPatches | None = None

    def __init__(self, skip_zero: bool, no_sync: bool, reuse: bool, skip_unseen: bool) -> None:
        features = {"skip_zero": skip_zero, "no_sync": no_sync, "reuse": reuse, "skip_unseen": skip_unseen}
        self._wanted = [name for name, wanted in features.items() if wanted]
        self._undo: list[Callable[[], None]] = []
        self.active: tuple[str, ...] = ()
        self.refused: dict[str, str] = {}

    def __enter__(self) -> TEPatches:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def install(self) -> None:
        """Patch TE. :class:`UBStateError` where patches are in place, :class:`UBUnsupportedError` without TE."""
        if TEPatches._installed is not None:
            raise UBStateError("te_backward_patches are in place already; remove() them first")
        try:
            from transformer_engine.pytorch.attention.dot_product_attention import context_parallel
        except ImportError as error:
            raise UBUnsupportedError(
                f"te_backward_patches needs Transformer Engine: pip install 'ub_dynamic[te]' ({error})"
            ) from error
        self.refused = probe(context_parallel)
        plan = _patches(context_parallel, self._wanted, self.refused)
        for name, replacement in plan.items():
            self._replace(context_parallel, name, replacement)
        self.active = tuple(plan)
        if self.refused:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            text = f"parts of this TE's ring attention are not as expected, and stay unpatched: {reasons}"
            warnings.warn(text, stacklevel=2)
        TEPatches._installed = self

    def remove(self) -> None:
        """Put back what was replaced; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        if TEPatches._installed is self:
            TEPatches._installed = None
        self.active = ()

    def _replace(self, module: Any, name: str, replacement: Any) -> None:
        owner, attribute = module, name
        if "." in name:
            owner, attribute = getattr(module, name.split(".")[0]), name.split(".")[1]
        original = vars(owner)[attribute]
        setattr(owner, attribute, replacement)
        self._undo.append(lambda: setattr(owner, attribute, original))


# What is patched, and the parameters that each patch relies on.
_NEEDS: dict[str, tuple[str, ...]] = {
    f"{_RING}.forward": ("ctx", "q", "k", "v", *te_ring.BOUNDARIES, "qkv_format", "pad_between_seqs", "cp_group"),
    f"{_RING}.backward": ("ctx", "dout"),
    "_zero_thd_padding": ("tensors", "cu_seqlens", "cu_seqlens_padded"),
    "is_graph_capturing": (),
    "get_cu_seqlens_on_cp_rank": te_ring.ON_RANK,
    "cp_p2p_fwd_prepare_qkv": (
        "qkv_format",
        "pad_between_seqs",
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "step",
        "cp_size",
        "section",
    ),
    "cp_p2p_fwd_fused_attn": ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "section"),
    "cp_p2p_bwd_fused_attn": ("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "section"),
}
_FEATURES: dict[str, tuple[str, ...]] = {
    "skip_zero": ("_zero_thd_padding",),
    "no_sync": ("is_graph_capturing",),
    "reuse": (
        "get_cu_seqlens_on_cp_rank",
        "cp_p2p_fwd_prepare_qkv",
        "cp_p2p_fwd_fused_attn",
        "cp_p2p_bwd_fused_attn",
        "tex",
    ),
    "skip_unseen": ("cp_p2p_fwd_prepare_qkv",),
}


def probe(module: Any) -> dict[str, str]:
    """Of the names in ``context_parallel`` that patches rely on those that are not as expected, with the reason."""
    refused = {}
    for name, needed in _NEEDS.items():
        function = _attribute(module, name)
        if function is None:
            refused[name] = "there is none"
            continue
        try:
            found = inspect.signature(function).parameters
        except (TypeError, ValueError):
            refused[name] = "its signature cannot be read"
            continue
        if missing := [parameter for parameter in needed if parameter not in found]:
            refused[name] = f"it has no parameter {', '.join(missing)}"
    if not callable(getattr(getattr(module, "tex", None), "thd_read_half_tensor", None)):
        refused["tex"] = "there is no thd_read_half_tensor"
    return refused


def _patches(module: Any, wanted: list[str], refused: dict[str, str]) -> dict[str, Any]:
    """Replacements by name. Everything rests on the ring's own forward and backward."""
    ring = (f"{_RING}.forward", f"{_RING}.backward")
    if not wanted or any(name in refused for name in ring):
        return {}
    makers = {
        "_zero_thd_padding": lambda: te_ring.zero_padding,
        "is_graph_capturing": lambda: te_ring.capture_flag(module.is_graph_capturing),
        "get_cu_seqlens_on_cp_rank": lambda: te_ring.boundaries_on_rank(module.get_cu_seqlens_on_cp_rank),
        "cp_p2p_fwd_prepare_qkv": lambda: te_ring.prepare(
            module.cp_p2p_fwd_prepare_qkv, "reuse" in wanted, "skip_unseen" in wanted
        ),
        "cp_p2p_fwd_fused_attn": lambda: te_ring.halved_boundaries(module.cp_p2p_fwd_fused_attn),
        "cp_p2p_bwd_fused_attn": lambda: te_ring.halved_boundaries(module.cp_p2p_bwd_fused_attn),
        "tex": lambda: te_ring.TexWithMemory(module.tex),
    }
    names = [name for feature in wanted for name in _FEATURES[feature] if name not in refused]
    if not names:
        return {}
    no_sync = "is_graph_capturing" in names
    function = getattr(module, _RING)
    return {
        ring[0]: staticmethod(te_ring.ring_forward(function.forward)),
        ring[1]: staticmethod(te_ring.ring_backward(function.backward, no_sync)),
        **{name: makers[name]() for name in names},
    }


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
