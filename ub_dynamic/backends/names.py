# SPDX-License-Identifier: Apache-2.0
"""TE's communicator names with the method, collective and settings that ``initialize_ub`` gives each.

Source: ``initialize_ub`` in Transformer Engine's ``pytorch/module/base.py`` (2.10 to 2.20).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from ..errors import UBShapeError, UBUnsupportedError
from ..overlap import OverlapConfig, OverlapMethod
from ..rules import INT32_LIMIT, check_capacity, check_even, check_spec
from ..shapes import METHODS, Collective, CommSpec, Method, Shape, as_int

# name -> (default method, collective)
LAYERS: Mapping[str, tuple[Method, Collective]] = {
    "qkv_fprop": ("ring_exchange", "ag"),
    "qkv_dgrad": ("bulk", "ag"),
    "qkv_wgrad": ("bulk", "rs"),
    "proj_fprop": ("pipeline", "rs"),
    "proj_dgrad": ("ring_exchange", "ag"),
    "proj_wgrad": ("external", "ag"),
    "fc1_fprop": ("ring_exchange", "ag"),
    "fc1_dgrad": ("bulk", "ag"),
    "fc1_wgrad": ("bulk", "rs"),
    "fc2_fprop": ("pipeline", "rs"),
    "fc2_dgrad": ("ring_exchange", "ag"),
    "fc2_wgrad": ("external", "ag"),
}
# dgrad with a method other than bulk reduce-scatters dgrad itself; TE then makes its wgrad communicator for no use
DGRAD_REDUCE_SCATTER = {"qkv_dgrad": "qkv_wgrad", "fc1_dgrad": "fc1_wgrad"}
AUTO_EXCLUDES_POLICY = (
    "auto=True takes T from an operand, when TE's layer has already decided how to overlap: with a policy set the "
    "shape before, by microbatch(T) or set_ub_active_shape"
)
# GEMM -> the methods that TE's modules have for it: what a policy chooses from. The wgrad of a column-parallel layer
# follows its dgrad: bulk with bulk, else none.
GEMM_METHODS: Mapping[str, tuple[OverlapMethod, ...]] = {
    "qkv_fprop": ("none", "ring_exchange"),
    "qkv_dgrad": ("none", "bulk", "ring_exchange", "pipeline"),
    "proj_fprop": ("none", "pipeline", "ring_exchange"),
    "proj_dgrad": ("none", "ring_exchange"),
    "fc1_fprop": ("none", "ring_exchange"),
    "fc1_dgrad": ("none", "bulk", "ring_exchange", "pipeline"),
    "fc2_fprop": ("none", "pipeline", "ring_exchange"),
    "fc2_dgrad": ("none", "ring_exchange"),
}
# The settings of one communicator in ub_cfgs, which TE passes on as keywords and would refuse in the middle of
# registering (the keywords of add_ub in TE 2.10 to 2.20).
CFG_KEYS = (
    "method",
    "is_reduce_scatter",
    "num_sm",
    "cga_size",
    "set_sm_margin",
    "num_splits",
    "aggregate",
    "atomic_gemm",
    "use_ce",
    "fp8_buf",
    "comm_priority",
    "gemm_priority",
    "pipeline_rs_overlap_first_gemm",
)
_WGRADS = {name for name in LAYERS if name.endswith("_wgrad")}
_COUNTS = ("num_sm", "cga_size", "num_splits")


def check_cfgs(ub_cfgs: Any) -> None:
    """Raise :class:`UBShapeError` unless ``ub_cfgs`` maps known communicators to known settings, or is None."""
    if ub_cfgs is None:
        return
    if not isinstance(ub_cfgs, Mapping):
        raise UBShapeError(f"ub_cfgs = {ub_cfgs!r}: it maps communicator names to mappings of settings")
    for name, cfg in ub_cfgs.items():
        if name not in LAYERS:
            raise UBShapeError(f"ub_cfgs names the unknown communicator {name!r}; known are {', '.join(LAYERS)}")
        if cfg is None:
            continue
        if not isinstance(cfg, Mapping):
            raise UBShapeError(f"ub_cfgs[{name!r}] = {cfg!r}: it maps settings to values, or is None")
        if unknown := [key for key in cfg if key not in CFG_KEYS]:
            raise UBShapeError(f"{name}: unknown setting {unknown[0]!r}; known are {', '.join(CFG_KEYS)}")
        for key in _COUNTS:
            _count(name, cfg, key, default=1)


def _count(name: str, cfg: Mapping[str, Any], key: str, default: int) -> int:
    """This setting of ``cfg`` as a Python int; its range is for :func:`~ub_dynamic.rules.check_spec`."""
    number = as_int(cfg.get(key, default))
    if number is None:
        raise UBShapeError(f"{name}: {key} = {cfg[key]!r}: it is a positive int; leave it out for TE's default")
    return number


def resolve_specs(
    shape: Shape,
    tp: int,
    dtype: torch.dtype,
    ub_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    quantised: bool = False,
    cublasmp: bool = False,
) -> tuple[CommSpec, ...]:
    """The communicators that ``initialize_ub(shape, tp, dtype=dtype, ub_cfgs=ub_cfgs)`` makes, in TE's order.

    ``shape`` is the capacity ``[T_cap, H]``. ``ub_cfgs`` maps a layer name to TE's settings ``method``,
    ``num_sm``, ``num_splits``, ``use_ce``, ``aggregate`` (the other :data:`CFG_KEYS` are TE's alone and ignored
    here); a name that maps to None, as Megatron's presets have it, keeps its default. ``quantised``: of TE's mode FP8,
    whose all-gathers have one byte an element, and pipelined reduce-scatters with ``fp8_buf``. ``cublasmp``:
    with cuBLASMp, where no wgrad communicates and a dgrad reduce-scatters, in a ring unless it is configured. Raises
    :class:`UBShapeError` for unknown names, settings and methods, and what :mod:`ub_dynamic.rules` refuses, at
    T = capacity too. Of cuBLASMp that is a capacity that ``tp`` does not divide; :class:`UBUnsupportedError` for a
    method that it does not have.
    """
    check_cfgs(ub_cfgs)
    cfgs = {name: cfg for name, cfg in (ub_cfgs or {}).items() if cfg is not None}
    specs = []
    absent: set[str] = set()
    for name, (default, _) in LAYERS.items():
        method = cfgs.get(name, {}).get("method", default)
        wgrad = DGRAD_REDUCE_SCATTER.get(name)
        if wgrad and method != "bulk":
            if wgrad in cfgs:
                raise UBShapeError(
                    f"{name} with method {method!r} reduce-scatters dgrad, so {wgrad} must not be configured"
                )
            absent.add(wgrad)
    if cublasmp:
        cfgs, absent = _of_cublasmp(cfgs), _WGRADS
    for name in LAYERS:
        if name not in absent:
            spec = _spec(name, shape, tp, dtype, cfgs.get(name, {}))
            if quantised and (spec.collective == "ag" or _scatters_fp8(spec, cfgs.get(name, {}))):
                spec = replace(spec, dtype=torch.uint8)
            specs.append(spec)
    if cublasmp:
        check_even(f"capacity {list(shape)}", shape[0], INT32_LIMIT, tp)
        return tuple(specs)
    for spec in specs:
        check_spec(spec)
    check_capacity(specs)
    return tuple(specs)


def _of_cublasmp(cfgs: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """``cfgs`` as TE completes them with cuBLASMp. Those of wgrads are not heard of again, of which TE warns."""
    for name, cfg in cfgs.items():
        if name not in _WGRADS and cfg.get("method") in ("bulk", "external"):
            raise UBUnsupportedError(
                f"{name}: cuBLASMp has no method {cfg['method']!r}; it has ring_exchange, and pipeline for RS"
            )
    return {**cfgs, **{name: {"method": "ring_exchange", **cfgs.get(name, {})} for name in DGRAD_REDUCE_SCATTER}}


def _spec(name: str, shape: Shape, tp: int, dtype: torch.dtype, cfg: Mapping[str, Any]) -> CommSpec:
    default, collective = LAYERS[name]
    method = cfg.get("method", default)
    if method not in METHODS:
        raise UBShapeError(f"{name}: unknown method {method!r}; methods are {', '.join(METHODS)}")
    if name in DGRAD_REDUCE_SCATTER and method != "bulk":
        collective = "rs"
    if method == "pipeline" and collective == "ag":
        raise UBShapeError(f"{name}: method 'pipeline' exists for reduce-scatter only")
    ring = method == "ring_exchange"
    return CommSpec(
        name=name,
        method=method,
        collective=collective,
        capacity=shape,
        tp=tp,
        dtype=dtype,
        num_splits=_count(name, cfg, "num_splits", tp if ring else 4),
        num_sm=_count(name, cfg, "num_sm", 1 if ring else 16),
        use_ce=bool(cfg.get("use_ce", True)),
        aggregate=bool(cfg.get("aggregate", False)),
    )


def _scatters_fp8(spec: CommSpec, cfg: Mapping[str, Any]) -> bool:
    """Whether TE heeds ``fp8_buf``: where a pipeline is the default, and in a dgrad that is set to one."""
    method = spec.method if spec.name in DGRAD_REDUCE_SCATTER else LAYERS[spec.name][0]
    return method == "pipeline" and bool(cfg.get("fp8_buf"))


def overlap_specs(configured: Mapping[str, CommSpec], gemm: str, config: OverlapConfig) -> dict[str, CommSpec | None]:
    """What stands under the names of ``gemm`` while it uses ``config``: a communicator, or None for none.

    The names are ``gemm`` and, for a dgrad of a column-parallel layer, the wgrad that follows it. A communicator of
    another method than the configured one is named ``"fc2_fprop (pipeline)"``, with TE's default settings where
    ``config`` has none. Raises :class:`UBUnsupportedError` for a GEMM or method that TE's modules do not have, and what
    :func:`~ub_dynamic.rules.check_spec` refuses.
    """
    _check_choice(gemm, config, [name for name in GEMM_METHODS if name in configured])
    base = configured[gemm]
    specs = {gemm: None if config.method == "none" else _alternative(base, base, config)}
    if wgrad := DGRAD_REDUCE_SCATTER.get(gemm):
        like = configured.get(wgrad) or replace(base, name=wgrad, method="ring_exchange")
        specs[wgrad] = _alternative(like, base, config) if config.method == "bulk" else None
    return specs


def check_choices(alternatives: Mapping[str, Iterable[OverlapConfig]]) -> None:
    """Raise :class:`UBUnsupportedError` for a GEMM, method or setting that TE's modules do not have at any size."""
    for gemm, configs in alternatives.items():
        for config in configs:
            _check_choice(gemm, config, list(GEMM_METHODS))


def _check_choice(gemm: str, config: OverlapConfig, known: Sequence[str]) -> None:
    if gemm not in known:
        raise UBUnsupportedError(f"a policy names the unknown GEMM {gemm!r}; known are {', '.join(known)}")
    if config.method not in GEMM_METHODS[gemm]:
        raise UBUnsupportedError(f"{gemm} has no method {config.method!r}; it has {', '.join(GEMM_METHODS[gemm])}")
    if config.aggregate and (LAYERS[gemm][1] == "rs" or gemm in DGRAD_REDUCE_SCATTER):
        _refuse_aggregate(gemm)


def _refuse_aggregate(name: str) -> NoReturn:
    raise UBUnsupportedError(
        f"{name}: aggregate = True is a setting of ring all-gathers, not of reduce-scatters; the next valid value is "
        "False"
    )


def _alternative(like: CommSpec, base: CommSpec, config: OverlapConfig) -> CommSpec:
    settings = {name: value for name, value in config.settings().items() if name != "first_gemm"}
    if like.method == config.method:
        spec = replace(like, **settings)
    else:
        fresh = _spec(like.name, base.capacity, base.tp, base.dtype, {"method": config.method, **settings})
        spec = replace(fresh, name=f"{like.name} ({config.method})")
    if spec.aggregate and spec.collective == "rs":
        _refuse_aggregate(like.name)
    check_spec(spec)
    return spec


def registered_specs(
    configured: Iterable[CommSpec], alternatives: Mapping[str, Iterable[OverlapConfig]]
) -> tuple[CommSpec, ...]:
    """The communicators to make so that each GEMM can use each of its ``alternatives``, the configured ones first.

    One a method: its settings can be rewritten, up to the largest ``num_splits``. Raises what :func:`overlap_specs`
    raises, and the :class:`UBShapeError` family for a capacity that one of them could not take.
    """
    base = {spec.name: spec for spec in configured}
    made = dict(base)
    for gemm, configs in alternatives.items():
        for config in configs:
            for spec in overlap_specs(base, gemm, config).values():
                if spec is not None:
                    splits = max(spec.num_splits, made.get(spec.name, spec).num_splits)
                    made[spec.name] = replace(made.get(spec.name, spec), num_splits=splits)
    check_capacity(made.values())
    return tuple(made.values())
