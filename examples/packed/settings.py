# SPDX-License-Identifier: Apache-2.0
"""The command line of ``train_packed.py``: what can be set, and what is refused with which text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ub_dynamic.ranks import Launch

Mode = Literal["dynamic", "pad", "rebuild"]
MODES: tuple[Mode, ...] = ("dynamic", "pad", "rebuild")

DESCRIPTION = """\
Train a small byte-level transformer on packed documents whose token count T differs from microbatch to
microbatch, with tensor-parallel communication/GEMM overlap on the CPU. Documents: the source files of this
Python's standard library; files longer than --max-document bytes are split into top-level functions and
classes, what is still longer is cropped. tp is the number of ranks:

    mpirun -n 2 python examples/train_packed.py
    torchrun --nproc-per-node 2 examples/train_packed.py
"""
DTYPES = ("float32", "bfloat16")
SPLITS_MULTIPLE = 32  # 8 * num_splits; with such an H, T needs to be a multiple of tp only


class UsageError(Exception):
    """A setting that cannot work; the text names the value and the rule."""


class Parser(argparse.ArgumentParser):
    """Raises :class:`UsageError` where argparse would print and exit."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The settings; :class:`UsageError` for unknown or wrong flags."""
    parser = Parser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what runs")
    what.add_argument("--mode", choices=MODES, help="one way to handle T: follow it, pad to capacity, register again")
    what.add_argument("--compare", action="store_true", help="all three over the same microbatches (the default)")
    what.add_argument("--steps", type=_positive, default=16, help="optimizer steps (default: 16)")
    what.add_argument("--accumulate", type=_positive, default=2, help="microbatches a step (default: 2)")
    what.add_argument(
        "--in-flight",
        type=_positive,
        default=2,
        help="forwards before the first backward, as in 1F1B schedules (default: 2; rebuild: always 1)",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--plan",
        choices=("fixed", "packed"),
        default="fixed",
        help="a fixed number of documents a microbatch, or as many as fill a token budget",
    )
    data.add_argument("--documents", type=_positive, default=4, help="documents a microbatch (default: 4)")
    data.add_argument("--max-document", type=_positive, default=2048, help="longest document in bytes (default: 2048)")
    data.add_argument(
        "--max-tokens", type=_positive, default=8192, help="token budget of --plan packed (default: 8192)"
    )
    data.add_argument("--seed", type=int, default=0, help="of the choice of documents and of the model (default: 0)")
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=_positive, default=128, help="H (default: 128)")
    model.add_argument("--layers", type=_positive, default=2, help="(default: 2)")
    model.add_argument("--heads", type=_positive, default=4, help="attention heads of all ranks (default: 4)")
    model.add_argument("--lr", type=float, default=3e-3, help="AdamW's peak learning rate (default: 0.003)")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        default=Path("out/train_packed"),
        metavar="FOLDER",
        help="for summary.json and tokens.png (default: out/train_packed)",
    )
    output.add_argument("--no-plot", action="store_true", help="no picture, and no need for matplotlib")
    output.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Chrome/Perfetto trace of the first mode's GEMMs and transfers",
    )
    output.add_argument("--json", action="store_true", help="the summary on stdout as JSON; everything else on stderr")
    output.add_argument(
        "--result", action="store_true", help="write benchmarks/results/demo.json too (needs dynamic and pad)"
    )
    settings = parser.parse_args(arguments)
    _check(settings)
    return settings


def chosen_modes(settings: argparse.Namespace) -> tuple[Mode, ...]:
    return MODES if settings.mode is None else (settings.mode,)


def check_ranks(settings: argparse.Namespace, launch: Launch) -> None:
    """:class:`UsageError` for what does not fit to the ranks that were started; tp is their number."""
    tp, heads = launch.world_size, settings.heads
    if heads % tp:
        raise UsageError(
            f"--heads {heads} cannot be divided among {tp} ranks; the next valid value is {_up(heads, tp)}"
        )
    if settings.result and not launch.uses_mpi:
        raise UsageError("--result describes a job over MPI: start it with mpirun")


def make_folders(settings: argparse.Namespace) -> None:
    """The folders of everything that will be written; :class:`UsageError` before hours of work are lost."""
    for folder in [settings.out, *([settings.trace.parent] if settings.trace else [])]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {folder}: {error.strerror}") from None


def _check(settings: argparse.Namespace) -> None:
    if settings.mode and settings.compare:
        raise UsageError("--compare runs every mode, --mode only one: give one of them")
    if settings.result and settings.mode:
        raise UsageError("--result needs dynamic and pad in one job: leave --mode out")
    hidden, heads = settings.hidden, settings.heads
    multiple = math.lcm(SPLITS_MULTIPLE, 2 * heads)
    if hidden % multiple:
        raise UsageError(
            f"--hidden {hidden} must be a multiple of {multiple}: of {SPLITS_MULTIPLE} for the pipeline "
            f"reduce-scatter and of 2 * --heads for rotary embedding; the next valid value is {_up(hidden, multiple)}"
        )
    if settings.lr <= 0:
        raise UsageError(f"--lr {settings.lr} must be positive")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
