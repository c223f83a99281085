# SPDX-License-Identifier: Apache-2.0
"""``bench op``: each GEMM with its collective, forward and backward apart, against the GEMM alone and every peer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import UBStateError
from ..manager import Manager
from ..overlap import OverlapConfig
from ..policy import Policy
from .interleave import interleaved, ratio, spread
from .operations import GEMMS, Gemm, check_sizes
from .peers import PEERS, Arm, Configured, Setting, switched_of
from .report import Budget, Report
from .subject import Refused, register
from .worlds import World

OURS = "policy"
RIVALS = ("default", "none", "async_tp", "cublasmp")  # what the policy is compared with
LARGE = 4096  # the T from which the policy must win, not only keep up


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    """Options: ``hidden``, ``ffn``, ``tokens`` (a list of T), ``gemms``, ``seconds``, ``policy`` (a table's path or
    None), ``peers`` (names).
    """
    hidden, ffn = options["hidden"], options["ffn"]
    check_sizes(hidden, ffn, world.size)
    gemms = [GEMMS[name] for name in options["gemms"]]
    policy = load_policy(world, options)
    named = {} if policy is None else policy.configurations()  # at any T, as training registers them
    none = OverlapConfig("none")
    wanted = {gemm.name: list(dict.fromkeys([*named.get(gemm.name, ()), none])) for gemm in gemms}
    manager, refused = register(world, max(options["tokens"]), hidden, wanted)
    for (name, config), reason in refused.items():
        report.refused(f"{name}, {config}: {reason}")
    lengths = sorted({manager.round_up_tokens(tokens) for tokens in options["tokens"]}, reverse=True)
    cells = [(gemm, tokens) for gemm in gemms for tokens in lengths]
    budget = Budget(options["seconds"], dict.fromkeys(cells, 1.0))
    done = 0
    for gemm in gemms:
        setting = Setting(world, manager, gemm, hidden, ffn, manager.capacity[0])
        arms = _arms(setting, policy, refused, options["peers"], report)
        _drop_what_fails(world, arms, manager, gemm, report)
        for tokens in lengths:
            report.progress(done, len(cells), f"{gemm.name} at T = {tokens}")
            manager.set_active_shape((tokens, hidden))
            row = _cell(world, arms, gemm, tokens, budget.until(cells[done]))
            choice = None if policy is None else policy.choices(tokens).get(gemm.name)
            chosen = "as configured" if choice is None else str(choice.config)
            report.row({**row, "tp": world.size, "hidden": hidden, "ffn": ffn, "policy": chosen})
            done += 1
        world.meet()
        for arm in arms.values():
            arm.close()
    report.progress(done, len(cells), "done")
    world.destroy()


def load_policy(world: World, options: Mapping[str, Any]) -> Policy | None:
    """That of the table at ``options["policy"]``; None without one. ``force``: also a table of another machine."""
    return table_policy(options, tp=world.size, dtype=world.dtype, mode=world.mode)


def table_policy(options: Mapping[str, Any], *, tp: int, dtype: torch.dtype, mode: str) -> Policy | None:
    """:func:`load_policy` for ranks that are still to be started."""
    if not options.get("policy"):
        return None
    from ..tuning_table import TuningTable

    table = TuningTable.load(Path(options["policy"]), force=options.get("force", False))
    sizes = {name: options[name] for name in ("hidden", "ffn")}
    table.check_fits(tp=tp, **sizes, dtype=str(dtype).removeprefix("torch."), mode=mode)
    return table.policy()


class _Policy:
    """The GEMM in the configuration that the policy chooses for this T."""

    def __init__(self, setting: Setting, policy: Policy, refused: Refused) -> None:
        self._switched, self._policy, self._name = switched_of(setting), policy, setting.gemm.name
        self._refused = refused

    def block(self, tokens: int, steps: int) -> float:
        choice = self._policy.choices(tokens).get(self._name)
        config = None if choice is None or (self._name, choice.config) in self._refused else choice.config
        return self._switched.block(config, tokens, steps)

    def close(self) -> None:
        return


def _arms(
    setting: Setting, policy: Policy | None, refused: Refused, names: Sequence[str], report: Report
) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    if policy is not None:
        arms[OURS] = _Policy(setting, policy, refused)
    for name in names:
        if (reason := PEERS[name].available(setting.world, setting.gemm)) is not None:
            report.refused(reason)
            continue
        arms[name] = PEERS[name].make(setting)
    if not any(isinstance(arm, Configured) for arm in arms.values()) and policy is None:
        arms["default"] = PEERS["default"].make(setting)
    return arms


def _drop_what_fails(world: World, arms: dict[str, Arm], manager: Manager, gemm: Gemm, report: Report) -> None:
    """One step of each arm; one that fails on some rank is left out on all, with the reason."""
    tokens, hidden = manager.capacity
    manager.set_active_shape((tokens, hidden))
    for name in list(arms):
        reason = None
        try:
            arms[name].block(tokens, 1)
        except Exception as error:
            reason = f"{name}, {gemm.name}: {type(error).__name__}: {error}"
        if told := [each for each in world.gather(reason) if each is not None]:
            if name in (OURS, "default"):
                raise UBStateError(told[0])
            report.refused(told[0])
            arms.pop(name).close()


def _cell(world: World, arms: Mapping[str, Arm], gemm: Gemm, tokens: int, until: float) -> dict[str, Any]:
    def block(arm: str, steps: int) -> float:
        return arms[arm].block(tokens, steps)

    taken = interleaved(tuple(arms), block, world.gather, until, block_ms=20.0, least_steps=3, least=1)
    row: dict[str, Any] = {"gemm": gemm.name, "operation": gemm.operation, "tokens": tokens}
    row["rounds"] = len(next(iter(taken.values())))
    for arm, times in taken.items():
        row[f"{arm}_us"] = 1000 * statistics.median(times)
        row[f"{arm}_spread_us"] = 1000 * spread(times)
        if "plain" in taken and arm != "plain":
            row[f"{arm}_over_plain"] = ratio(times, taken["plain"]).median
    rivals = [arm for arm in RIVALS if arm in taken]
    if OURS in taken and rivals:
        best = min(rivals, key=lambda arm: statistics.median(taken[arm]))
        row["best_peer"] = best
        row |= ratio(taken[OURS], taken[best]).fields("over_best_peer")
    return row


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``over_best_peer_max``: the policy's time over that of the best peer, at worst; ``..._geomean_t4096``: the
    geometric mean of that from T = 4096 on. Without a policy: what a default costs over its plain GEMM.
    """
    made: dict[str, float] = {"cells": len(rows)}
    if over := [row["over_best_peer"] for row in rows if "over_best_peer" in row]:
        made["over_best_peer_max"] = max(over)
    if large := [row["over_best_peer"] for row in rows if "over_best_peer" in row and row["tokens"] >= LARGE]:
        made["over_best_peer_geomean_t4096"] = math.exp(statistics.fmean(map(math.log, large)))
    for arm in (OURS, *RIVALS):
        if found := [row[f"{arm}_over_plain"] for row in rows if f"{arm}_over_plain" in row]:
            made[f"{arm}_over_plain_geomean"] = math.exp(statistics.fmean(map(math.log, found)))
    return made
