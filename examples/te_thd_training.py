# SPDX-License-Identifier: Apache-2.0
"""Train a THD TransformerLayer stack with TP overlap on a GPU, a different token count in every microbatch.

    python -m ub_dynamic one-gpu -n 2 --mps -- python examples/te_thd_training.py
    torchrun --nproc-per-node 2 examples/te_thd_training.py --hidden 4096 --heads 32 --layers 4 --max-document
    16384

Data, flags and modes are those of the CPU example, ``examples/train_packed.py``; ``--help`` lists them. It
computes in bfloat16.
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
from packed.settings import UsageError, check_ranks, chosen_modes, make_folders, parse

import ub_dynamic as ub
from ub_dynamic.ranks import Launch, discover
from ub_dynamic.testing.one_gpu import active_ranks, device


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for an error of the job, 2 for a wrong setting."""
    launch = discover()
    try:
        settings = read_settings(arguments)
        check_ranks(settings, launch)
        check_machine(launch)
        make_folders(settings)
        run_job(settings, launch)
    except UsageError as error:  # every rank comes here
        if launch.rank == 0:
            print(f"te_thd_training.py: {error}", file=sys.stderr)
        return 2
    except ub.UBDynamicError as error:
        print(f"te_thd_training.py, rank {launch.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # the other ranks may be waiting for this one; the launcher ends them
    return 0


def read_settings(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags of the CPU example, without those that belong to its backend."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    settings = parse(["--dtype", "bfloat16", "--out", "out/te_thd_training", *given])
    if settings.dtype != "bfloat16":
        raise UsageError(f"--dtype {settings.dtype}: TE's reduce-scatter kernels compute in bfloat16")
    for name in ("trace", "result"):
        if getattr(settings, name):
            raise UsageError(f"--{name} belongs to the CPU example, examples/train_packed.py")
    return settings


def check_machine(launch: Launch) -> None:
    """:class:`UsageError` with what is missing, before anything runs."""
    if launch.world_size < 2:
        raise UsageError("TP overlap needs 2 ranks or more: python -m ub_dynamic one-gpu -n 2 -- python " + sys.argv[0])
    if not torch.cuda.is_available():
        raise UsageError("a CUDA device is needed; examples/train_packed.py runs on CPUs")
    for package, extra in (("transformer_engine", "te"), ("rich", "cli")):
        if find_spec(package) is None:
            raise UsageError(f"{package} is missing: pip install 'ub_dynamic[{extra}]'")


def run_job(settings: argparse.Namespace, launch: Launch) -> None:
    """Prepare, train, report; rank 0 alone speaks and writes."""
    # Only now: check_machine has seen that what these need is there.
    import torch.distributed as dist
    from packed.job import prepare
    from packed.report import ProgressBar, make_console, table
    from packed.train import Buffers
    from thd.model import ModelConfig
    from thd.train import Place, Run, take_turns

    from ub_dynamic.groups import TorchGroup

    here = torch.device(device())
    torch.cuda.set_device(here)
    dist.init_process_group("nccl")
    place = Place(TorchGroup(dist.new_group(backend="gloo")), dist.group.WORLD, here)
    work = prepare(settings, place.group.size)
    buffers = Buffers(lambda tokens: register(tokens, settings.hidden, place.group.size), work.capacity)
    buffers.at(work.capacity)  # TE wants UserBuffers before it makes a layer that overlaps
    config = ModelConfig(settings.hidden, settings.layers, settings.heads, settings.max_document, settings.seed)
    runs = [Run(mode, config, settings.lr, settings.in_flight, buffers, place) for mode in chosen_modes(settings)]
    console = make_console(settings, launch.rank)
    with ProgressBar(console, len(work.steps) * len(runs)) as progress:
        take_turns([run for run in runs if run.mode != "rebuild"], work, progress.advance)
        take_turns([run for run in runs if run.mode == "rebuild"], work, progress.advance)
    ub.destroy_ub()
    if launch.rank == 0:
        summary = summarise(settings, work, runs)
        path = settings.out / "summary.json"
        path.write_text(json.dumps(summary, indent=1) + "\n")
        console.print(table(summary))
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
        if settings.json:
            print(json.dumps(summary, indent=1))
    dist.destroy_process_group()


def register(tokens: int, hidden: int, tp: int) -> None:
    """TE's communicators for ``tokens``."""
    ub.initialize_ub([tokens, hidden], tp, dtype=torch.bfloat16, bootstrap_backend="gloo", backend="te")


def summarise(settings: argparse.Namespace, work: Any, runs: Sequence[Any]) -> dict[str, Any]:
    """What is shown, in the form of the CPU example. How much of the transfers GEMMs hide, TE does not tell."""
    pad = next((run for run in runs if run.mode == "pad"), None)
    ranks = active_ranks()
    where = f"{ranks} ranks on one GPU" if ranks else torch.cuda.get_device_name()
    return {
        "tp": torch.distributed.get_world_size(),
        "transport": f"Transformer Engine's UserBuffers, {where}",
        "capacity": work.capacity,
        "microbatches": len(runs[0].records),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()},
        "modes": {run.mode: _mode(run, work.capacity, pad) for run in runs},
        "rows": [{"mode": run.mode, **vars(record)} for run in runs for record in run.records],
    }


def _mode(run: Any, capacity: int, pad: Any) -> dict[str, Any]:
    tokens, padded = sum(record.tokens for record in run.records), capacity * len(run.records)
    seconds = _seconds(run)
    return {
        "real_tokens": sum(record.real_tokens for record in run.records),
        "tokens": tokens,
        "padded_tokens": padded,
        "saved_token_fraction": 1 - tokens / padded,
        "shape_changes": run.shape_changes,
        "allocations_after_start": run.allocations,
        "hidden_transfer_fraction": None,
        "microbatch_seconds": seconds,
        "time_over_pad": seconds / _seconds(pad) if pad else None,
        "seconds": run.seconds,
        "loss_first": run.losses[0],
        "loss_last": run.losses[-1],
        "losses": run.losses,
    }


def _seconds(run: Any) -> float:
    return sum(record.seconds for record in run.records)


if __name__ == "__main__":
    sys.exit(main())
