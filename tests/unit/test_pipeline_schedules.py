# SPDX-License-Identifier: Apache-2.0
"""Schedules: every pass once, in an order in which no rank waits forever, with the warm-up that is known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ub_dynamic.cli.app import app
from ub_dynamic.errors import UBShapeError, UBStateError
from ub_dynamic.pipeline import Action, interleaved_1f1b, make_schedule, one_f_one_b, simulate, timeline
from ub_dynamic.pipeline.timeline import token_cost, unit_cost

SIZES = [(pp, vpp, m) for pp in (1, 2, 3, 4, 5, 8) for vpp in (1, 2, 3, 4) for m in (1, 2, 3, 4, 7, 8, 9, 13, 16)]


def names(vpp: int) -> list[str]:
    return ["1f1b", "interleaved", "forward"] if vpp == 1 else ["interleaved", "forward"]


def test_every_pass_once_and_no_rank_waits_forever() -> None:
    for pp, vpp, microbatches in SIZES:
        for name in names(vpp):
            found = timeline(name, pp, vpp, microbatches)  # raises where the ranks would wait for each other
            kinds = ["forward"] if name == "forward" else ["forward", "backward"]
            every = {Action(kind, c, m) for kind in kinds for c in range(vpp) for m in range(microbatches)}
            for rank in range(pp):
                assert Counter(bar.action for bar in found.of_rank(rank)) == dict.fromkeys(every, 1)


def test_microbatches_of_a_chunk_go_back_in_order() -> None:
    """So that parameter gradients add up as without a pipeline."""
    for pp, vpp, microbatches in SIZES:
        for rank in range(pp):
            for kind in ("forward", "backward"):
                for chunk in range(vpp):
                    plan = make_schedule("interleaved", rank, pp, vpp, microbatches)
                    order = [a.microbatch for a in plan if (a.kind, a.chunk) == (kind, chunk)]
                    assert order == list(range(microbatches))


def test_neighbours_agree_on_the_order_of_messages() -> None:
    """Each channel is first-in first-out: what one rank sends in order, the next one takes in that order."""
    for pp, vpp, microbatches in SIZES:
        if pp == 1:
            continue
        for name in names(vpp):
            plans = [list(make_schedule(name, rank, pp, vpp, microbatches)) for rank in range(pp)]
            for kind, step in (("forward", 1), ("backward", -1)):
                for rank in range(pp):
                    peer = (rank + step) % pp
                    sent = [(a.chunk * pp + rank + step, a.microbatch) for a in plans[rank] if a.kind == kind]
                    taken = [(a.chunk * pp + peer, a.microbatch) for a in plans[peer] if a.kind == kind]
                    end = 0 if kind == "forward" else pp * vpp - 1
                    assert [m for m in sent if 0 <= m[0] < pp * vpp] == [m for m in taken if m[0] != end]


def words(plan) -> str:
    return " ".join(f"{a.kind[0]}{a.microbatch}.{a.chunk}" for a in plan)


def test_known_1f1b() -> None:
    assert words(one_f_one_b(0, 4, 5)) == "f0.0 f1.0 f2.0 f3.0 b0.0 f4.0 b1.0 b2.0 b3.0 b4.0"
    assert words(one_f_one_b(3, 4, 3)) == "f0.0 b0.0 f1.0 b1.0 f2.0 b2.0"


def test_known_interleaved() -> None:
    """pp 2, vpp 2, four microbatches, rank 0: four forwards first, and groups of two (arXiv:2104.04473, figure 4)."""
    expected = "f0.0 f1.0 f0.1 f1.1 f2.0 b0.1 f3.0 b1.1 f2.1 b0.0 f3.1 b1.0 b2.1 b3.1 b2.0 b3.0"
    assert words(interleaved_1f1b(0, 2, 2, 4)) == expected


def test_bubbles_are_those_of_the_papers() -> None:
    """(pp - 1) / (vpp m) of the ideal time is idle, so that share of the whole is ((pp-1)/(vpp m)) / (1 + ...)."""
    for pp, vpp, microbatches in ((4, 1, 8), (4, 2, 8), (4, 4, 8), (8, 2, 16)):
        ratio = (pp - 1) / (vpp * microbatches)
        found = timeline("interleaved" if vpp > 1 else "1f1b", pp, vpp, microbatches)
        assert found.bubble(0) == pytest.approx(ratio / (1 + ratio))


def test_held_microbatches() -> None:
    found = timeline("1f1b", 4, 1, 8)
    assert [found.peak_in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    found = timeline("interleaved", 4, 2, 8)
    assert [found.peak_in_flight(rank) for rank in range(4)] == [11, 9, 7, 5]


def test_passes_take_time_in_proportion_to_tokens() -> None:
    tokens = [100, 300]
    found = timeline("1f1b", 1, 1, 2, token_cost(tokens))
    assert [bar.end - bar.start for bar in found.bars] == [0.5, 1.0, 1.5, 3.0]


def test_a_schedule_that_would_hang_is_refused() -> None:
    plans = [[Action("forward", 0, 0), Action("backward", 0, 0), Action("forward", 0, 1)]]
    plans.append([Action("forward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 0)])
    with pytest.raises(UBStateError, match=r"wait for each other forever: rank 0 at .*backward.*, rank 1 at .*forward"):
        simulate(plans, 1, unit_cost)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1b", 0, 4, 2, 8), "1f1b has one chunk a rank, not vpp = 2"),
        (("1f1b", 4, 4, 1, 8), "rank = 4 is not one of the pp = 4 ranks 0 to 3"),
        (("interleaved", 0, 4, 2, 0), "microbatches = 0: it must be at least 1"),
        (("forward", 0, 0, 2, 8), "pp = 0"),
        (("zero bubble", 0, 4, 1, 8), "'zero bubble'"),
    ],
)
def test_bad_arguments(arguments: tuple, says: str) -> None:
    with pytest.raises(UBShapeError, match=says):
        list(make_schedule(*arguments))


def run(*words: str):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["schedule", *words])


def test_command_shows_every_rank() -> None:
    result = run("--pp", "4", "--vpp", "2", "--microbatches", "8", "--blocks", "0,2,4,6")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["0", "0,", "4", "11", "32", "48", "15.8", "%", "11"] in rows
    assert ["3", "3,", "7", "5", "32", "48", "15.8", "%", "5"] in rows
    assert "16 without the cache of a rank, 10 with it" in result.output


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize("words", [["--vpp", "2"], ["--tokens", "5,9,2,1"], ["--forward-only", "--vpp", "3"]])
def test_command_draws(tmp_path: Path, words: list[str], suffix: str) -> None:
    out = tmp_path / f"f.{suffix}"
    result = run("--pp", "2", "--microbatches", "4", *words, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:5] == (b"<?xml" if suffix == "svg" else b"\x89PNG\r")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pp", "0", "--microbatches", "4"], "pp = 0: it must be at least 1"),
        (["--pp", "2", "--microbatches", "4", "--tokens", "5,9"], "2 numbers for 4 microbatches"),
        (["--pp", "2", "--microbatches", "1", "--tokens", "0"], "0 is below 1"),
        (["--pp", "2", "--microbatches", "1", "--tokens", "many"], "not a list of numbers"),
        (["--pp", "2", "--microbatches", "4", "--blocks", "0,2"], "there is no stage 2 of 2"),
        (["--pp", "2", "--microbatches", "4", "--out", "f.gif"], "f.gif ends in none of"),
    ],
)
def test_command_refuses(words: list[str], says: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert says in result.output
