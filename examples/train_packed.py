# SPDX-License-Identifier: Apache-2.0
"""Train on packed documents with a different token count in every microbatch: ``--help`` says how."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed works too

from packed.settings import UsageError, check_ranks, chosen_modes, make_folders, parse

from ub_dynamic import UBDynamicError
from ub_dynamic.groups import tensor_parallel_group
from ub_dynamic.ranks import Launch, discover


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for an error of the job, 2 for a wrong setting, 130 for Ctrl-C."""
    launch = discover()
    try:
        with redirect_stdout(io.StringIO()) if launch.rank else nullcontext():  # one --help is enough
            settings = parse(arguments)
        check_ranks(settings, launch)
        check_extras(settings)
        make_folders(settings)
        run_job(settings, launch)
    except UsageError as error:  # every rank comes here
        if launch.rank == 0:
            print(f"train_packed.py: {error}", file=sys.stderr)
        return 2
    except UBDynamicError as error:
        end_all_ranks(launch, 1, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        end_all_ranks(launch, 130, "interrupted")
    return 0


def run_job(settings: argparse.Namespace, launch: Launch) -> None:
    """Prepare, train, report; rank 0 alone speaks and writes."""
    # Only now: check_extras has seen that what these need is there.
    from packed.job import prepare, train, use_own_cores
    from packed.report import ProgressBar, make_console, table
    from packed.summary import summarise, write_files

    use_own_cores(launch)
    group = tensor_parallel_group(launch.world_size)
    work = prepare(settings, group.size)
    console = make_console(settings, launch.rank)
    with ProgressBar(console, len(work.steps) * len(chosen_modes(settings))) as progress:
        runs = train(settings, work, group, progress.advance)
    summary = summarise(settings, work, group, runs)
    if settings.trace:
        runs[0].save_trace(settings.trace)
    if launch.rank == 0:
        written = write_files(settings, summary, runs)
        console.print(table(summary))
        for path in written:
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
        if settings.json:
            print(json.dumps(summary, indent=1))


def check_extras(settings: argparse.Namespace) -> None:
    """:class:`UsageError` with what to install, before anything runs."""
    needed = {"numpy": "mpi", "rich": "cli"} | ({} if settings.no_plot else {"matplotlib": "plot"})
    for package, extra in needed.items():
        if find_spec(package) is None:
            without = ", or leave the picture out with --no-plot" if extra == "plot" else ""
            raise UsageError(f"{package} is missing: pip install 'ub_dynamic[{extra}]'{without}")


def end_all_ranks(launch: Launch, code: int, text: str) -> None:
    """Say what happened and end the job at once: the other ranks may be waiting for this one."""
    print(f"train_packed.py, rank {launch.rank}: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if launch.uses_mpi and "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(code)
    os._exit(code)  # torchrun then ends the others


if __name__ == "__main__":
    sys.exit(main())
