# SPDX-License-Identifier: Apache-2.0
"""The further communicators that a choice by T takes beside those of TE's ``initialize_ub``.

One communicator serves every setting of one method. A GEMM that is to use two methods has two: TE makes the ring
reduce-scatter, whose memory is the largest, and the other one is made small and pointed at that memory, so that it
costs no second buffer. All of them live in TE's own table, the further ones under names that no module asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ...errors import UBCapacityError, UBUnsupportedError
from ...overlap import OverlapConfig
from ...shapes import CommSpec, Shape
from ..names import DGRAD_REDUCE_SCATTER, GEMM_METHODS, LAYERS, overlap_specs, registered_specs, resolve_specs
from ..protocol import Alternatives
from .hazards import refuse_pipelined
from .shutdown import Bootstrap

Settings = Mapping[str, Any]  # TE's words, as in ``ub_cfgs``
Cfgs = Mapping[str, Settings]
MAX_REGIONS = 31  # buffers that TE registers in a process
_SMALL_ROWS = 8  # a rank, of a buffer that nobody uses
_COMM_SETTINGS: Settings = {"num_sm": 16, "cga_size": 2, "set_sm_margin": True, "num_splits": 4}
_DEFAULTS: Mapping[str, Settings] = {
    "ring_exchange": {"num_sm": 1, "cga_size": 1, "set_sm_margin": False},
    "pipeline": {**_COMM_SETTINGS, "pipeline_rs_overlap_first_gemm": False},
    "bulk": _COMM_SETTINGS,
}
_REWRITTEN = {"method", "num_sm", "set_sm_margin", "num_splits"}
_WORDS = {
    "num_sm": "num_comm_sm",
    "cga_size": "comm_cga_size",
    "set_sm_margin": "set_sm_margin",
    "num_splits": "num_splits",
    "pipeline_rs_overlap_first_gemm": "rs_overlap_first_gemm",
    "comm_priority": "comm_priority",
    "gemm_priority": "gemm_priority",
}


@dataclass(frozen=True)
class Gemm:
    """One GEMM with several ways to overlap it.

    ``settings``: by method, what its communicator does where a choice says nothing. ``splits``: the largest
    ``num_splits`` of its pipeline.
    """

    name: str
    configs: tuple[OverlapConfig, ...]
    configured: str
    settings: Mapping[str, Settings]
    splits: int

    def communicator(self, method: str) -> str:
        """The name of the communicator of ``method``."""
        return self.name if method == self.configured else f"{self.name} ({method})"

    @property
    def second(self) -> str | None:
        """The method beside the configured one, if there are two."""
        return next((method for method in self.settings if method != self.configured), None)

    @property
    def switches_off(self) -> bool:
        return any(config.method == "none" for config in self.configs)


@dataclass(frozen=True)
class Further:
    """A ``CommOverlap`` to make: its layer in TE's table, its settings, whose memory it uses (None: its own)."""

    layer: str
    settings: Settings
    owner: str | None


@dataclass(frozen=True)
class Arrangement:
    """All that has to be made. ``specs``: the communicators as configured, without a policy."""

    gemms: Mapping[str, Gemm]
    specs: Mapping[str, CommSpec]
    cfgs: Cfgs
    ub_cfgs: dict[str, dict[str, Any]]
    further: tuple[Further, ...]

    def bulk_wgrad(self, wgrad: str) -> Settings:
        """The settings of the communicator that reduce-scatters while the weight gradient is computed."""
        return settings_of(wgrad, "bulk", self.cfgs)


def arrange(alternatives: Alternatives, cfgs: Cfgs | None, capacity: Shape, tp: int, dtype: torch.dtype) -> Arrangement:
    """What TE's ``initialize_ub`` is to be given instead of ``cfgs``, and what is to be made afterwards.

    Raises the :class:`UBShapeError` family and :class:`UBUnsupportedError` for configurations that TE does not have.
    """
    cfgs = cfgs or {}
    specs = {spec.name: spec for spec in resolve_specs(capacity, tp, dtype, cfgs)}
    registered_specs(specs.values(), alternatives)
    gemms = {name: _gemm(name, configs, cfgs, specs) for name, configs in alternatives.items()}
    ub_cfgs = {name: dict(cfg) for name, cfg in cfgs.items()}
    further: list[Further] = []
    for gemm in gemms.values():
        further += _arrange_one(gemm, cfgs, ub_cfgs)
    resolve_specs(capacity, tp, dtype, ub_cfgs)
    beside = sum(each.owner is not None for each in further)
    regions = len(LAYERS) + beside  # TE makes all its names, whether a GEMM uses them or not
    if regions > MAX_REGIONS:
        raise UBCapacityError(
            f"the policy takes {beside} communicators beside TE's own, {regions} in all, and TE registers at "
            f"most {MAX_REGIONS} buffers a process; leave GEMMs of {regions - MAX_REGIONS} of them to one method"
        )
    return Arrangement(gemms, specs, cfgs, ub_cfgs, tuple(further))


def alone(gemm: str, config: OverlapConfig, cfgs: Cfgs | None = None) -> dict[str, dict[str, Any]]:
    """The ``ub_cfgs`` that give ``gemm`` this configuration at every T, without a policy.

    For ``"none"`` they are ``cfgs``: the layer has to be built without the overlap.
    """
    made = {name: dict(cfg) for name, cfg in (cfgs or {}).items()}
    if config.method == "none":
        return made
    made[gemm] = {**settings_of(gemm, config.method, cfgs or {}), **te_words(config)}
    if wgrad := DGRAD_REDUCE_SCATTER.get(gemm):
        made.pop(wgrad, None)
        if config.method == "bulk":
            made[wgrad] = {**settings_of(wgrad, "bulk", cfgs or {}), **te_words(config)}
    return made


def settings_of(name: str, method: str, cfgs: Cfgs) -> dict[str, Any]:
    """TE's settings of ``method``: as configured if it is the configured one, else TE's defaults for its method."""
    own = cfgs.get(name, {})
    default = LAYERS[name][0]
    if method != own.get("method", default):
        return {"method": method, **_DEFAULTS[method]}
    # TE completes a configuration by the defaults of the layer's usual method, except for a dgrad reduce-scatter.
    completed_by = method if name in DGRAD_REDUCE_SCATTER else default
    return {**_DEFAULTS[completed_by], **own, "method": method}


def te_words(config: OverlapConfig) -> dict[str, Any]:
    """The settings of ``config`` in TE's words."""
    words = {"first_gemm": "pipeline_rs_overlap_first_gemm"}
    return {words.get(name, name): value for name, value in config.settings().items()}


def check(gemm: str, config: OverlapConfig, specs: Mapping[str, CommSpec]) -> None:
    """Raise for what TE or its kernels would not do: :class:`UBUnsupportedError` or :class:`UBShapeError`."""
    overlap_specs(specs, gemm, config)
    if config.method == "pipeline":
        refuse_pipelined(gemm, quantised=False)


def _gemm(name: str, configs: tuple[OverlapConfig, ...], cfgs: Cfgs, specs: Mapping[str, CommSpec]) -> Gemm:
    configured = specs[name].method
    if configured not in GEMM_METHODS[name] or cfgs.get(name, {}).get("atomic_gemm"):
        raise UBUnsupportedError(f"{name} is configured as {dict(cfgs.get(name, {}))}, which leaves nothing to choose")
    for config in configs:
        check(name, config, specs)
    methods = [configured, *(config.method for config in configs if config.method != "none")]
    settings: dict[str, Settings] = {method: settings_of(name, method, cfgs) for method in methods}
    splits = [settings.get("pipeline", {}).get("num_splits", 1), *(config.num_splits or 1 for config in configs)]
    return Gemm(name, configs, configured, settings, max(splits))


def _arrange_one(gemm: Gemm, cfgs: Cfgs, ub_cfgs: dict[str, dict[str, Any]]) -> list[Further]:
    """Changes ``ub_cfgs`` of this GEMM and returns what is to be made beside it."""
    settings = {method: dict(values) for method, values in gemm.settings.items()}
    if "pipeline" in settings:
        # TE makes min(3, num_splits) streams at once, and a pipeline of more splits needs them
        settings["pipeline"]["num_splits"] = gemm.splits if gemm.splits > 2 else 4
    if gemm.second is None:
        if gemm.configured == "pipeline":
            ub_cfgs[gemm.name] = settings["pipeline"]
        return []
    ub_cfgs[gemm.name] = settings.pop("ring_exchange")
    ((method, other),) = settings.items()
    further = [Further(gemm.communicator(method), other, gemm.communicator("ring_exchange"))]
    if wgrad := DGRAD_REDUCE_SCATTER.get(gemm.name):
        ub_cfgs.pop(wgrad, None)
        if fixed := set(cfgs.get(wgrad, {})) - _REWRITTEN:
            raise UBUnsupportedError(
                f"{wgrad}: {sorted(fixed)} cannot be configured while a policy chooses between methods for {gemm.name}"
            )
        further.append(Further(wgrad, settings_of(wgrad, "bulk", cfgs), None))
    return further


def construct(
    arrangement: Arrangement,
    table: dict[Any, Any],
    mode: Any,
    capacity: Shape,
    tp: int,
    dtype: torch.dtype,
    native: ModuleType,
    bootstrap: Bootstrap,
) -> None:
    """Make the further communicators in TE's ``table``, the configured one of each GEMM under its own name.

    Collective: every rank makes the same in the same order.
    """
    import transformer_engine_torch as tex

    for gemm in arrangement.gemms.values():
        if gemm.second is not None and gemm.configured != "ring_exchange":
            table[gemm.communicator("ring_exchange"), mode] = table[gemm.name, mode]
    for each in arrangement.further:
        if (each.layer, mode) in table and each.owner is None:
            _settle(native, table[each.layer, mode], each.settings)
            continue
        shape = capacity if each.owner is None else (_SMALL_ROWS * tp, capacity[1])
        arguments = _arguments(each, bootstrap.usual)
        table[each.layer, mode] = tex.CommOverlap(list(shape), dtype, bootstrap.helper, tp, **arguments)
        if native.inspect(table[each.layer, mode])["region"] < 0:
            raise UBCapacityError(f"{each.layer}: TE has no region left; it registers at most {MAX_REGIONS} a process")
        if each.owner is not None:
            native.adopt(table[each.layer, mode], table[each.owner, mode], capacity[0])
    for gemm in arrangement.gemms.values():
        if "pipeline" in gemm.settings:
            key = gemm.communicator("pipeline"), mode
            _, num_sm, math_sms = native.settings(table[key])
            native.set_settings(table[key], gemm.splits, num_sm, math_sms)


def _settle(native: ModuleType, communicator: Any, settings: Settings) -> None:
    """Give a communicator that TE made with its defaults these settings. It makes the bulk reduce-scatter of a wgrad
    even where dgrad reduce-scatters, and would not take a configuration of it."""
    num_splits, num_sm, math_sms = native.settings(communicator)
    own = settings["num_sm"] if settings["set_sm_margin"] else 0
    native.set_settings(communicator, num_splits, settings["num_sm"], math_sms + num_sm - own)


def _arguments(each: Further, usual: Mapping[str, Any]) -> dict[str, Any]:
    import transformer_engine_torch as tex

    given = {_WORDS[word]: value for word, value in each.settings.items() if word in _WORDS}
    arguments = {**usual, **given, "atomic_gemm": False}
    if "comm_type" in usual:  # since 2.17
        gathers = each.owner is not None and each.layer.split(" ")[0] in DGRAD_REDUCE_SCATTER
        arguments["comm_type"] = tex.CommOverlapType.AG if gathers else tex.CommOverlapType.RS
    return arguments
