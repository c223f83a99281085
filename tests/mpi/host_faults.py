# SPDX-License-Identifier: Apache-2.0
"""A rank program for test_host_faults.py: rank 1 does something wrong, every rank writes down what it saw.

python host_faults.py FAULT FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from ub_dynamic.ranks import discover

RANK, SIZE = discover().rank, discover().world_size
FAULT, FOLDER = sys.argv[1], Path(sys.argv[2])
BAD = 1
HIDDEN, ROWS = 64, 2048  # a chunk of half a megabyte: too large to be sent without its receiver


def main() -> None:
    import torch

    import ub_dynamic as ubd
    from ub_dynamic.backends.host import ColumnParallelLinear, RowParallelLinear, get_ub
    from ub_dynamic.overlap import OverlapConfig

    check = "never" if FAULT in ("other-T-unchecked", "skip-operation") else "deferred"
    policy = (lambda gemm, tokens: OverlapConfig("none")) if FAULT == "other-gemm" else None
    ubd.initialize_ub((ROWS * SIZE, HIDDEN), SIZE, dtype=torch.float32, backend="host", check=check, policy=policy)  # type: ignore[arg-type]
    bad = RANK == BAD

    def ring(at_chunk: int | None = None) -> None:
        comm = get_ub("qkv_fprop")
        comm.copy_into_buffer(torch.ones(comm.local_rows, HIDDEN), local_chunk=True)
        for step, (_, chunk) in enumerate(comm.all_gather_chunks()):
            if step == at_chunk:
                end_here()
            chunk @ chunk.t()[:, :64]

    def end_here() -> None:
        if FAULT.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif FAULT == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("a mistake in the middle of a ring")

    layer = ColumnParallelLinear(HIDDEN, 64 * SIZE, ub_name="fc1")
    if FAULT == "other-gemm":  # messages of the same size
        row = RowParallelLinear(64 * SIZE, HIDDEN, ub_name="fc2")
        row(torch.ones(ROWS * SIZE, 64)) if bad else layer(torch.ones(ROWS, HIDDEN))
        ubd.destroy_ub()
        return
    for _ in range(3):
        ring()
    if FAULT.startswith("killed") or FAULT in ("stopped", "raises", "caught"):
        ring(at_chunk=1 if bad else None)
        ring()  # between two ranks the bad one may have sent all that the first ring needs
    elif FAULT.startswith("other-T"):
        tokens = (ROWS - 8 if bad else ROWS // 2) * SIZE
        ubd.set_ub_active_shape((tokens, HIDDEN))
        layer(torch.ones(tokens // SIZE, HIDDEN))
    elif FAULT == "skip-shape":
        ubd.set_ub_active_shape((ROWS // 2 * SIZE, HIDDEN))
        layer(torch.ones(ROWS // 2, HIDDEN))
        if not bad:
            ubd.set_ub_active_shape((ROWS * SIZE, HIDDEN))
        ubd.set_ub_active_shape((ROWS // 4 * SIZE, HIDDEN))
        layer(torch.ones(ROWS // 4, HIDDEN))
    elif FAULT == "skip-operation":
        if not bad:
            ring()
        layer(torch.ones(ROWS, HIDDEN))
    elif FAULT == "skip-last-operation" and not bad:
        ring()
    ubd.destroy_ub()


def note(**what: object) -> None:
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(what))


def keep_the_launcher_waiting() -> None:
    """Run the rest in a child, so that the launcher does not see this rank die and leaves the others alone."""
    child = os.fork()
    if child == 0:
        return
    os.waitpid(child, 0)
    deadline = time.monotonic() + 40
    others = [FOLDER / f"rank{rank}.json" for rank in range(SIZE) if rank != BAD]
    while time.monotonic() < deadline and not all(file.exists() for file in others):
        time.sleep(0.05)
    os._exit(9)


if __name__ == "__main__":
    if FAULT == "killed-unnoticed" and RANK == BAD:
        keep_the_launcher_waiting()
    begin = time.monotonic()
    try:
        main()
        note(error=None)
    except Exception as error:
        note(error=type(error).__name__, text=str(error), seconds=time.monotonic() - begin)
        if FAULT != "caught":
            raise
