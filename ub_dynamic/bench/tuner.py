# SPDX-License-Identifier: Apache-2.0
"""``tune`` on the ranks: every GEMM at every bucket of T, the candidates in turns, a winner by the rule of
:mod:`ub_dynamic.bench.race`.

A cell is one GEMM at one T. Cells are measured in the order of their arithmetic, which is about their share of a
training step; those that the time does not reach keep the default, and say so. The backward of a column-parallel
linear is measured whole, dgrad with its wgrad, as the two share their collectives. All ranks see the times of the
slowest one, and so decide the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..overlap import OverlapConfig
from .candidates import candidates, default_of
from .interleave import is_over
from .operations import GEMMS, Gemm, check_sizes
from .race import pick, race, summary
from .report import Budget, Report
from .subject import Operation, Switched, register
from .worlds import World, refusal

PLAIN = "the GEMM alone"
LEAST_CELL_S = 0.5  # with less time left a cell is not begun
UNMEASURED = "not measured: the time was over"


@dataclass(frozen=True)
class Cell:
    """One GEMM at one T."""

    gemm: Gemm
    tokens: int


def cells_of(gemms: Sequence[str], tokens: Sequence[int], hidden: int, ffn: int, tp: int) -> list[Cell]:
    """The most important first: by arithmetic, forward before backward where it is equal."""
    found = [Cell(GEMMS[name], count) for name in gemms for count in tokens]
    return sorted(found, key=lambda cell: -cell.gemm.flops(cell.tokens, hidden, ffn, tp))


def measure(world: World, options: Mapping[str, Any], report: Report) -> None:
    """Options: ``hidden``, ``ffn``, ``tokens`` (a list of T), ``gemms``, ``seconds``, ``done`` (pairs of GEMM and T
    that a table has already).
    """
    hidden, ffn = options["hidden"], options["ffn"]
    check_sizes(hidden, ffn, world.size)
    wanted = _wanted(world, options["gemms"], hidden, report)
    manager, refused = register(world, max(options["tokens"]), hidden, wanted, ub_cfgs=world.cfgs)
    for (name, config), reason in refused.items():
        report.refused(f"{name}, {config}: {reason}")
    tokens = sorted({manager.round_up_tokens(count) for count in options["tokens"]})
    done = {(gemm, int(count)) for gemm, count in options["done"]}
    cells = [
        cell
        for cell in cells_of(options["gemms"], tokens, hidden, ffn, world.size)
        if (cell.gemm.name, cell.tokens) not in done
    ]
    field = _Field(world, manager, hidden, ffn, {gemm: _left(gemm, wanted, refused) for gemm in wanted})
    budget = Budget(options["seconds"], {cell: field.size(cell.gemm) for cell in cells})
    for number, cell in enumerate(cells):
        report.progress(number, len(cells), f"{cell.gemm.name} at T = {cell.tokens}")
        until = budget.until(cell)
        if is_over(world.gather, budget.left < LEAST_CELL_S):
            report.row(field.unmeasured(cell))
        else:
            report.row(field.measure(cell, until))
    report.progress(len(cells), len(cells), "done")
    del manager, field
    world.destroy()


def _wanted(world: World, gemms: Sequence[str], hidden: int, report: Report) -> dict[str, list[OverlapConfig]]:
    """Per GEMM what is measured beside the default."""
    found: dict[str, list[OverlapConfig]] = {}
    for name in gemms:
        default = default_of(name, world.cfgs, world.backend)
        found[name] = [
            config for config in candidates(GEMMS[name], world.size, hidden, world.backend) if config != default
        ]
        reason = refusal(world.mode, "none")
        if reason is not None:
            report.refused(reason)
            found[name] = [config for config in found[name] if config.method != "none"]
    return found


def _left(
    gemm: str, wanted: Mapping[str, Sequence[OverlapConfig]], refused: Mapping[tuple[str, OverlapConfig], str]
) -> list[OverlapConfig]:
    return [config for config in wanted[gemm] if (gemm, config) not in refused]


class _Field:
    """The candidates of every GEMM on the communicators that stand, and their operations, made when first needed."""

    def __init__(
        self, world: World, manager: Any, hidden: int, ffn: int, wanted: Mapping[str, Sequence[OverlapConfig]]
    ) -> None:
        self._world, self._manager, self._sizes, self._wanted = world, manager, (hidden, ffn), wanted
        self._made: dict[str, tuple[Switched, Operation]] = {}

    def size(self, gemm: Gemm) -> float:
        """How many arms a cell of it has."""
        return 2.0 + len(self._wanted[gemm.name])

    def unmeasured(self, cell: Cell) -> dict[str, Any]:
        """The row of a cell that was not reached: without candidates."""
        default = default_of(cell.gemm.name, self._world.cfgs, self._world.backend)
        return self._row(cell, default, UNMEASURED)

    def measure(self, cell: Cell, until: float) -> dict[str, Any]:
        """The row of a cell: the winner, the reason, and what was measured."""
        default = default_of(cell.gemm.name, self._world.cfgs, self._world.backend)
        configs: dict[str, OverlapConfig | None] = {str(default): None}
        configs |= {str(config): config for config in self._wanted[cell.gemm.name]}
        switched, plain = self._operations(cell.gemm)
        self._manager.set_active_shape((cell.tokens, self._sizes[0]))

        def block(arm: str, steps: int) -> float:
            if arm == PLAIN:
                return plain.block(cell.tokens, steps)
            return switched.block(configs[arm], cell.tokens, steps)

        taken = race(tuple(configs), block, self._world.gather, until, beside=(PLAIN,))
        winner, reason = pick(tuple(configs), taken)
        row = self._row(cell, configs[winner] or default, reason)
        row["gemm_us"] = summary(taken[PLAIN])[0]
        for arm, config in configs.items():
            median, half = summary(taken[arm])
            measured = {"config": (config or default).to_json(), "median_us": median, "spread_us": half}
            row["candidates"].append(measured)
        return row

    def _row(self, cell: Cell, config: OverlapConfig, reason: str) -> dict[str, Any]:
        """As :class:`~ub_dynamic.tuning_table.TuningTable` writes it."""
        chosen = config.to_json()
        return {"gemm": cell.gemm.name, "tokens": cell.tokens, "chosen": chosen, "reason": reason, "candidates": []}

    def _operations(self, gemm: Gemm) -> tuple[Switched, Operation]:
        if gemm.name not in self._made:
            capacity = self._manager.capacity[0]
            operation = Operation(self._world, gemm, *self._sizes, capacity)
            plain = Operation(self._world, gemm, *self._sizes, capacity, plain=True)
            self._made[gemm.name] = Switched(self._manager, gemm, operation), plain
        return self._made[gemm.name]
