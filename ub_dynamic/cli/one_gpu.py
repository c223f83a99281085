# SPDX-License-Identifier: Apache-2.0
"""``one-gpu``: run a program on several ranks that share one GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import UBDynamicError
from ..testing.one_gpu import OneGpu, exit_status, run


def one_gpu(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments, after --")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks")] = 2,
    mps: Annotated[
        bool, typer.Option("--mps/--no-mps", help="A private MPS daemon, so that ranks run side by side")
    ] = False,
    device: Annotated[str | None, typer.Option(help="Index or UUID of the GPU; default: the first visible one")] = None,
    local_rank: Annotated[str, typer.Option(help="LOCAL_RANK: 'rank' as torchrun, or 'zero' on every rank")] = "rank",
    timeout: Annotated[float | None, typer.Option(help="Seconds after which everything is ended (status 124)")] = None,
) -> None:
    """Run a program on several tensor-parallel ranks that share ONE GPU.

    Example: python -m ub_dynamic one-gpu -n 4 --mps -- python train.py

    Each rank sees the environment that torchrun would give it, and cuda:0. Output is prefixed by the rank;
    the exit status is that of the first rank that failed. Results are right; timings against NCCL mean
    nothing in this mode.
    """
    try:
        outcome = run(command, OneGpu(ranks, device=device, mps=mps, local_rank=local_rank, timeout_s=timeout))
    except UBDynamicError as error:
        typer.echo(f"one-gpu: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as ended:
        raise typer.Exit(exit_status(ended)) from None
    raise typer.Exit(outcome.returncode)


if __name__ == "__main__":
    typer.run(one_gpu)
