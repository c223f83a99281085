# SPDX-License-Identifier: Apache-2.0
"""The command line of ``megatron_gpt.py``: what can be set, and what is refused with which text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from packed.settings import SPLITS_MULTIPLE, Parser, UsageError

Mode = Literal["dynamic", "pad", "none", "stock"]
MODES: tuple[Mode, ...] = ("dynamic", "pad", "none", "stock")
RECOMPUTE = ("no", "selective", "full")
DESCRIPTION = """\
Train megatron-core's GPTModel of TE layers on packed documents whose token count T differs from microbatch to
microbatch, with tp_comm_overlap. Documents: the source files of this Python's standard library, byte by byte.

    python -m ub_dynamic one-gpu -n 4 --mps -- python examples/megatron_gpt.py --tp 2 --pp 2
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --pp 2 --hidden 4096 --heads 32 --layers 8

modes: dynamic   each microbatch has its own T, through ub_dynamic.integrations.megatron
       pad       each microbatch is padded to the capacity; padding is left out of attention and loss
       none      each microbatch has its own T, without TP overlap: the reference of the other two
       stock     as dynamic, without install(): Transformer Engine raises at the first other T
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The settings; :class:`UsageError` for unknown or wrong flags."""
    parser = Parser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what runs")
    what.add_argument("--mode", choices=MODES, nargs="+", default=["dynamic", "pad"], help="(default: dynamic pad)")
    what.add_argument("--steps", type=int, default=50, help="optimizer steps (default: 50)")
    what.add_argument("--microbatches", type=int, default=4, help="of each step (default: 4)")
    what.add_argument("--recompute", choices=RECOMPUTE, default="no", help="activations (default: no)")
    what.add_argument(
        "--bucket", type=int, help="run dynamic from CUDA graphs, one for each multiple of so many tokens"
    )
    split = parser.add_argument_group("parallelism")
    split.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    split.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    split.add_argument("--vpp", type=int, help="model chunks a stage, for the interleaved schedule")
    data = parser.add_argument_group("data")
    data.add_argument("--documents", type=int, default=4, help="of a microbatch (default: 4)")
    data.add_argument("--max-document", type=int, default=2048, help="longest document in bytes (default: 2048)")
    data.add_argument("--seed", type=int, default=0, help="of the choice of documents and of the model (default: 0)")
    model = parser.add_argument_group("model")
    model.add_argument("--hidden", type=int, default=512, help="H (default: 512)")
    model.add_argument("--layers", type=int, default=4, help="of all stages (default: 4)")
    model.add_argument("--heads", type=int, default=8, help="attention heads of all ranks (default: 8)")
    model.add_argument("--lr", type=float, default=1e-3, help="Adam's peak learning rate (default: 0.001)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, default=Path("out/megatron_gpt"), metavar="FOLDER", help="of what is written"
    )
    output.add_argument("--no-plot", action="store_true", help="no picture, and no need for matplotlib")
    output.add_argument("--json", action="store_true", help="the summary on stdout as JSON; everything else on stderr")
    settings = parser.parse_args(arguments)
    check(settings)
    return settings


def check(settings: argparse.Namespace) -> None:
    """:class:`UsageError` for settings that do not go together."""
    counts = ("steps", "microbatches", "tp", "pp", "documents", "max_document", "hidden", "layers", "heads")
    for name in (*counts, *(name for name in ("vpp", "bucket") if getattr(settings, name) is not None)):
        if getattr(settings, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(settings, name)} must be positive")
    if settings.tp < 2:
        raise UsageError(f"--tp {settings.tp}: TP overlap needs 2 ranks or more")
    chunks = settings.pp * (settings.vpp or 1)
    _multiple("--layers", settings.layers, chunks, "of pipeline stages times chunks")
    _multiple("--heads", settings.heads, settings.tp, "of --tp")
    wanted = math.lcm(SPLITS_MULTIPLE, 2 * settings.heads)
    _multiple("--hidden", settings.hidden, wanted, "for the pipeline reduce-scatter and rotary embedding")
    if settings.vpp is not None:
        if settings.pp < 2:
            raise UsageError("--vpp needs --pp 2 or more")
        _multiple("--microbatches", settings.microbatches, settings.pp, "of --pp, in the interleaved schedule")
    if "stock" in settings.mode and len(settings.mode) > 1:
        raise UsageError("--mode stock runs alone: it is to show TE's own error")
    if settings.bucket is not None and "dynamic" not in settings.mode:
        raise UsageError("--bucket belongs to --mode dynamic")


def check_ranks(settings: argparse.Namespace, ranks: int) -> None:
    """:class:`UsageError` if the ranks that were started cannot be divided so."""
    _multiple("the number of ranks", ranks, settings.tp * settings.pp, "of --tp times --pp")


def _multiple(name: str, value: int, of: int, why: str) -> None:
    if value % of:
        raise UsageError(
            f"{name} {value} must be a multiple of {of}, {why}; the next valid value is {-(-value // of) * of}"
        )
