# SPDX-License-Identifier: Apache-2.0
"""Plans: what every communicator of a choosing GEMM does at one stage of a policy, computed once, switched to in one
native call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

from ...errors import UBShapeError, UBUnsupportedError
from ...overlap import OverlapConfig
from ..names import DGRAD_REDUCE_SCATTER
from .alternatives import Arrangement, Gemm, check, te_words
from .communicators import Communicator, communicator_name
from .flags import Flags, Methods

logger = logging.getLogger("ub_dynamic")
_TABLE = "_ub_communicators"  # of TE's module base
_LEAVE = -1  # a flag that the communicator does not have


@dataclass(frozen=True)
class Plan:
    """``stand``: gives the communicators their settings and places; ``methods``: what the layers' flags follow."""

    stand: Callable[[], None]
    methods: Methods


@dataclass(frozen=True)
class _Made:
    """A communicator as it was made: its index in the registry, and what it does by itself."""

    index: int
    num_splits: int
    num_sm: int
    math_sms: int
    margin: bool
    aggregate: int
    first_gemm: int

    def setting(self, words: Mapping[str, Any]) -> tuple[int, ...]:
        """The native setting with ``words``, TE's, instead of its own."""
        num_sm = words.get("num_sm", self.num_sm)
        return (
            self.index,
            words.get("num_splits", self.num_splits),
            num_sm,
            self.math_sms + (self.num_sm - num_sm if self.margin else 0),
            int(words.get("aggregate", self.aggregate)),
            int(words.get("pipeline_rs_overlap_first_gemm", self.first_gemm)),
        )


class Plans:
    """Makes plans for one set of communicators and switches to them; ``notes``: what no plan can do."""

    def __init__(
        self, arrangement: Arrangement, communicators: tuple[Communicator, ...], native: ModuleType, registry: Any,
        names: dict[str, Any], mode: Any,
    ) -> None:  # fmt: skip
        self._arrangement = arrangement
        self._registry = registry
        self._names = names
        self._made = _read(arrangement, communicators, native)
        self.notes: Mapping[str, str] = MappingProxyType(_notes(arrangement))
        self._flags = Flags()
        registry.use_table(names, _TABLE)
        keys = {key: key for key in names[_TABLE]}  # the table's own, which it finds without comparing them
        for gemm in self._paired():
            assert gemm.second is not None
            other = gemm.communicator(gemm.second)
            indices = self._made[gemm.name].index, self._made[other].index
            registry.pair(keys[gemm.name, mode], keys[other, mode], *indices)
        self.switch(self.plan({}))
        self.follow_choices(True)

    def plan(self, choices: Mapping[str, OverlapConfig]) -> Plan:
        """The plan in which each GEMM of ``choices`` does as chosen, and the others as configured."""
        for name, config in choices.items():
            self._check(name, config)
        settings: list[tuple[int, ...]] = []
        for gemm in self._arrangement.gemms.values():
            settings += self._settings(gemm, choices.get(gemm.name))
        exchanged = [gemm.name in choices and choices[gemm.name].method == gemm.second for gemm in self._paired()]
        methods = MappingProxyType({name: config.method for name, config in choices.items()})
        return Plan(self._registry.plan(settings, exchanged), methods)

    def switch(self, plan: Plan) -> None:
        """Host only, no allocation."""
        plan.stand()
        self._flags.methods = plan.methods

    def methods(self) -> Methods:
        """What the plan that stands has chosen, by GEMM."""
        return self._flags.methods

    def stands_for(self, comm: Communicator) -> str:
        """The name under which TE's modules find this communicator now."""
        table = self._names[_TABLE].items()
        return next(communicator_name(key) for key, made in table if made is comm.reference())

    def follow_choices(self, follow: bool) -> None:
        """Let TE's layers read their flags from what is chosen, if any choice concerns them, or give them back."""
        if not follow:
            self.close()
        elif any(gemm.switches_off for gemm in self._arrangement.gemms.values()) or any(
            gemm.name in DGRAD_REDUCE_SCATTER for gemm in self._paired()
        ):
            self._flags.install()

    def close(self) -> None:
        """Give TE's layers their flags back."""
        for name in self._flags.remove():
            logger.warning("%s was replaced by somebody else and is left as it is", name)

    def _paired(self) -> list[Gemm]:
        return [gemm for gemm in self._arrangement.gemms.values() if gemm.second is not None]

    def _check(self, name: str, config: OverlapConfig) -> None:
        check(name, config, self._arrangement.specs)
        gemm = self._arrangement.gemms.get(name)
        if gemm is None or (config.method != "none" and config.method not in gemm.settings):
            known = [str(each) for each in gemm.configs] if gemm else []
            raise UBUnsupportedError(
                f"{name}: no communicator was made for {config}; initialize_ub was given the alternatives {known}"
            )
        if config.method == "none":
            if not gemm.switches_off:
                raise UBUnsupportedError(f'{name}: initialize_ub was not told that it may be switched off ("none")')
            return
        made = self._made[gemm.communicator(config.method)]
        if config.num_splits is not None and config.num_splits > gemm.splits:
            raise UBShapeError(
                f"{name}: num_splits = {config.num_splits}, but its communicator was made for at most {gemm.splits}; "
                f"the next valid value is {gemm.splits}"
            )
        if config.first_gemm is not None and made.first_gemm == _LEAVE:
            raise UBUnsupportedError(f"{name}: this Transformer Engine has no pipeline_rs_overlap_first_gemm")
        if made.setting(te_words(config))[3] < 1:
            raise UBShapeError(
                f"{name}: num_sm = {config.num_sm} leaves the GEMM no multiprocessor of {made.math_sms + made.num_sm}; "
                f"the next valid value is {made.math_sms + made.num_sm - 1}"
            )

    def _settings(self, gemm: Gemm, config: OverlapConfig | None) -> list[tuple[int, ...]]:
        made = []
        for method, configured in gemm.settings.items():
            words = {"num_splits": configured["num_splits"]} if method == "pipeline" else {}
            if config is not None and config.method == method:
                words |= te_words(config)
            made.append(self._made[gemm.communicator(method)].setting(words))
            wgrad = DGRAD_REDUCE_SCATTER.get(gemm.name)
            if wgrad and method == "bulk":
                made.append(self._made[wgrad].setting(words))
        return made


def _read(arrangement: Arrangement, communicators: tuple[Communicator, ...], native: ModuleType) -> dict[str, _Made]:
    dynamic = [comm for comm in communicators if comm.spec is not None]
    index = {comm.name: number for number, comm in enumerate(dynamic)}
    found = {}
    for name, settings in _configured(arrangement).items():
        if name not in index:
            reason = next(comm.skipped for comm in communicators if comm.name == name)
            raise UBUnsupportedError(f"{name} cannot take part in a policy, it stays at capacity: {reason}")
        comm = dynamic[index[name]].reference()
        facts = native.inspect(comm)
        num_splits, num_sm, math_sms = native.settings(comm)
        found[name] = _Made(
            index[name],
            num_splits,
            num_sm,
            math_sms,
            bool(settings["set_sm_margin"]),
            int(facts.get("aggregate", _LEAVE)),
            int(facts.get("first_gemm", _LEAVE)),
        )
    return found


def _configured(arrangement: Arrangement) -> dict[str, Mapping[str, Any]]:
    """Every communicator that a plan sets, with TE's settings that it was made with."""
    found: dict[str, Mapping[str, Any]] = {}
    for gemm in arrangement.gemms.values():
        for method, settings in gemm.settings.items():
            found[gemm.communicator(method)] = settings
        if (wgrad := DGRAD_REDUCE_SCATTER.get(gemm.name)) and "bulk" in gemm.settings:
            found[wgrad] = arrangement.bulk_wgrad(wgrad)
    return found


def _notes(arrangement: Arrangement) -> dict[str, str]:
    notes = {}
    for name, gemm in arrangement.gemms.items():
        said = []
        if gemm.switches_off:
            said.append(
                "te.Linear, LayerNormLinear and LayerNormMLP follow a choice of none; a fused linear of te.ops goes on "
                "overlapping as configured"
            )
        if gemm.switches_off and name in ("fc1_fprop", "fc2_dgrad"):
            said.append(
                "LayerNormMLP has one flag for the all-gathers of fc1_fprop and fc2_dgrad, and switches them off where "
                "both are none, not one alone"
            )
        if gemm.second is not None and name in DGRAD_REDUCE_SCATTER:
            said.append("a fused linear of te.ops has a bulk overlap only, and refuses a T that chooses ring_exchange")
        if said:
            notes[name] = "; ".join(said)
    return notes
