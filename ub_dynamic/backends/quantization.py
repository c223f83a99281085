# SPDX-License-Identifier: Apache-2.0
"""What ``initialize_ub`` is asked to make in each of TE's quantization modes.

Source: ``initialize_ub`` in Transformer Engine's ``pytorch/module/base.py`` (2.10 to 2.20).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UBShapeError, UBUnsupportedError
from ..shapes import CommSpec, Shape
from .names import DGRAD_REDUCE_SCATTER, check_cfgs, resolve_specs

NONE, FP8 = "none", "fp8"  # the values of TE's UserBufferQuantizationMode
Cfgs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Mode:
    """One quantization mode. ``cfgs``: its ``ub_cfgs``, without the names that map to None, as Megatron's presets have
    them: those keep their defaults. ``specs``: the communicators that TE makes."""

    value: str
    cfgs: Cfgs | None
    specs: tuple[CommSpec, ...]

    @property
    def quantised(self) -> bool:
        return self.value != NONE

    @property
    def pipelined_dgrads(self) -> tuple[str, ...]:
        """The dgrads whose reduce-scatter is pipelined."""
        return tuple(
            spec.name for spec in self.specs if spec.name in DGRAD_REDUCE_SCATTER and spec.method == "pipeline"
        )


def resolve_modes(
    shape: Shape,
    tp: int,
    dtype: torch.dtype,
    ub_cfgs: Any = None,
    quantization_modes: Any = None,
    use_fp8: bool = False,
    with_cublasmp: bool = False,
) -> tuple[Mode, ...]:
    """The modes in the order in which ``initialize_ub`` makes them.

    The arguments are TE's: ``ub_cfgs`` is one mapping for all modes or a sequence of one each; without
    ``quantization_modes`` there is one mode, chosen by ``use_fp8``. Raises :class:`UBUnsupportedError` for modes that
    TE does not have and what it cannot do in several, and what :func:`~ub_dynamic.backends.names.resolve_specs` raises.
    """
    values = mode_values(quantization_modes, use_fp8)
    modes: list[Mode] = []
    carried: dict[str, str] = {}
    for value, cfgs in zip(values, mode_cfgs(ub_cfgs, len(values)), strict=True):
        read = _carry(carried, value, cfgs or {}, "ring_exchange" if with_cublasmp else "bulk")
        specs = resolve_specs(shape, tp, dtype, read, quantised=value != NONE, cublasmp=with_cublasmp)
        modes.append(Mode(value, cfgs, specs))
    return tuple(modes)


def mode_values(quantization_modes: Any, use_fp8: bool) -> tuple[str, ...]:
    """``"none"`` or ``"fp8"`` for each mode that is asked for."""
    if not quantization_modes:
        return (FP8 if use_fp8 else NONE,)
    listed = isinstance(quantization_modes, Sequence)
    values: tuple[Any, ...] = tuple(getattr(mode, "value", None) for mode in quantization_modes) if listed else (None,)
    if not set(values) <= {NONE, FP8}:
        raise UBUnsupportedError(
            f"quantization_modes = {quantization_modes!r}: it is a list of TE's UserBufferQuantizationMode.NONE and "
            ".FP8"
        )
    if len(set(values)) != len(values):
        raise UBShapeError(
            f"quantization_modes {[str(mode) for mode in quantization_modes]} names a mode twice: TE would replace the "
            "first communicators by the second, and the destructor of the first ones takes the shared communicator "
            "along"
        )
    return values


def is_by_mode(ub_cfgs: Any) -> bool:
    """Whether ``ub_cfgs`` is a sequence of one mapping a mode, not one for all of them."""
    return isinstance(ub_cfgs, Sequence) and not isinstance(ub_cfgs, str)


def mode_cfgs(ub_cfgs: Any, count: int) -> list[Cfgs | None]:
    """One checked configuration for each of ``count`` modes."""
    given = list(ub_cfgs) if is_by_mode(ub_cfgs) else [ub_cfgs] * count
    for cfgs in given:
        check_cfgs(cfgs)
    if len(given) != count:
        raise UBShapeError(f"ub_cfgs has {len(given)} entries for {count} quantization modes")
    return [
        None if cfgs is None else {name: dict(cfg) for name, cfg in cfgs.items() if cfg is not None} for cfgs in given
    ]


def _carry(carried: dict[str, str], value: str, cfgs: Cfgs, default: str) -> Cfgs:
    """What TE makes of ``cfgs`` in mode ``value``, after modes that left ``carried``: methods by dgrad, added to here.
    ``default``: the method of a dgrad that is not configured.

    TE notes a dgrad that reduce-scatters in tables of the whole call: later modes have it too, in a buffer of BF16.
    """
    read = dict(cfgs)
    for name, method in carried.items():
        own = cfgs.get(name, {})
        if own.get("method", "bulk") != "bulk":
            raise UBUnsupportedError(
                f"{name}: TE's initialize_ub takes method {own['method']!r} in one quantization mode only, and the "
                "modes after it have it too: leave the method out of their ub_cfgs"
            )
        if "method" in own and value == FP8 and default == "bulk":
            raise UBUnsupportedError(
                f"{name}: after a mode with method {method!r} TE makes its buffer in BF16, which a bulk all-gather in "
                "FP8 refuses: give mode FP8 first"
            )
        if "method" not in own:
            read.pop(DGRAD_REDUCE_SCATTER[name], None)  # nothing uses it
        read[name] = {"method": method, **own}
    for name in DGRAD_REDUCE_SCATTER:
        if (method := read.get(name, {}).get("method", default)) != "bulk":
            carried[name] = method
    return read
