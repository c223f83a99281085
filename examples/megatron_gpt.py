# SPDX-License-Identifier: Apache-2.0
"""Train megatron-core's GPTModel with TP overlap on GPUs, a different token count in every microbatch.

    python -m ub_dynamic one-gpu -n 2 --mps -- python examples/megatron_gpt.py
    python -m ub_dynamic one-gpu -n 4 --mps -- python examples/megatron_gpt.py --tp 2 --pp 2 --mode dynamic pad none
    torchrun --nproc-per-node 4 examples/megatron_gpt.py --tp 2 --pp 2 --hidden 4096 --heads 32 --layers 8

The one line that a Megatron script needs is ``ub_dynamic.integrations.megatron.install()``, before Megatron
initialises. ``--mode stock`` leaves it out and ends in Transformer Engine's error; ``--help`` lists the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works too

import torch
from gpt.settings import check_ranks, parse
from packed.settings import UsageError, make_folders

import ub_dynamic as ub
from ub_dynamic.ranks import Launch, discover
from ub_dynamic.testing.one_gpu import active_ranks, device

PACKAGES = (("transformer_engine", "te"), ("megatron.core", "megatron"), ("rich", "cli"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for an error of the job, 2 for a wrong setting."""
    launch = discover()
    try:
        settings = parse(arguments)
        check_machine(settings, launch)
        check_ranks(settings, launch.world_size)
        settings.trace = None
        make_folders(settings)
        run_job(settings, launch)
    except UsageError as error:  # every rank comes here
        if launch.rank == 0:
            print(f"megatron_gpt.py: {error}", file=sys.stderr)
        return 2
    except (ub.UBDynamicError, RuntimeError, AssertionError) as error:
        print(f"megatron_gpt.py, rank {launch.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # the other ranks may be waiting for this one; the launcher ends them
    return 0


def check_machine(settings: argparse.Namespace, launch: Launch) -> None:
    """:class:`UsageError` with what is missing, before anything runs."""
    if not torch.cuda.is_available():
        raise UsageError("a CUDA device is needed; examples/train_packed.py runs on CPUs")
    for package, extra in PACKAGES:
        if not _is_there(package):
            raise UsageError(f"{package} is missing: pip install 'ub_dynamic[{extra}]'")
    if launch.world_size < settings.tp * settings.pp:
        wanted = settings.tp * settings.pp
        raise UsageError(
            f"{wanted} ranks are needed for --tp {settings.tp} --pp {settings.pp}, {launch.world_size} run: "
            f"python -m ub_dynamic one-gpu -n {wanted} --mps -- python {sys.argv[0]}"
        )


def run_job(settings: argparse.Namespace, launch: Launch) -> None:
    """Prepare, train, report; rank 0 alone speaks and writes."""
    # Only now: check_machine has seen that what these need is there.
    import torch.distributed as dist
    from gpt.model import initialize_parallel, initialize_userbuffers
    from gpt.report import draw, summarise, table
    from gpt.train import Run, data_parallel, take_turns
    from gpt.work import prepare
    from packed.report import ProgressBar, make_console

    from ub_dynamic.integrations import megatron

    if "stock" not in settings.mode:
        megatron.install()
    torch.cuda.set_device(torch.device(device()))
    dist.init_process_group("nccl")
    initialize_parallel(settings)
    work = prepare(settings, *data_parallel())
    if set(settings.mode) != {"none"}:
        initialize_userbuffers(work.capacity, settings)
    runs = [Run(mode, settings, work) for mode in dict.fromkeys(settings.mode)]
    console = make_console(settings, launch.rank)
    with ProgressBar(console, len(work.steps) * len(runs)) as progress:
        take_turns(runs, work, progress.advance)
    summary = summarise(settings, work, runs)
    for run in runs:
        run.close()
    ub.destroy_ub()
    if launch.rank == 0:
        report(settings, summary, console, table, draw)
    dist.destroy_process_group()


def report(settings: argparse.Namespace, summary: dict[str, Any], console: Any, table: Any, draw: Any) -> None:
    """The files, the table, and where the files are."""
    ranks = active_ranks()
    summary["machine"] = f"{ranks} ranks on one GPU" if ranks else torch.cuda.get_device_name()
    written = [settings.out / "summary.json"]
    written[0].write_text(json.dumps(summary, indent=1) + "\n")
    if not settings.no_plot:
        written.append(settings.out / "loss.png")
        draw(written[-1], summary)
    console.print(table(summary))
    for path in written:
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    if settings.json:
        print(json.dumps(summary, indent=1))


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


if __name__ == "__main__":
    sys.exit(main())
