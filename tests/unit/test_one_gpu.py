# SPDX-License-Identifier: Apache-2.0
"""The one-GPU launcher's process handling, which needs no GPU: environments, failures, signals, leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import lines, shell, wait_until
from typer.testing import CliRunner

from ub_dynamic import UBShapeError, UBStateError
from ub_dynamic.cli.app import app
from ub_dynamic.testing.one_gpu import TIMED_OUT, OneGpu, active_ranks, device, exit_status, run

REPOSITORY = str(Path(__file__).resolve().parents[2])


def pids_with(text: str) -> list[int]:
    """Processes whose command line holds ``text``, other than this one."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if text.encode() in Path("/proc", name, "cmdline").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def test_every_rank_has_its_environment() -> None:
    ranks = "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE"
    script = f"echo {ranks} $MASTER_ADDR $CUDA_VISIBLE_DEVICES $NCCL_IB_DISABLE $UB_SKIPMC"
    assert lines(shell(script), OneGpu(2, device="3", timeout_s=30)) == (
        0,
        None,
        ["[rank 0] 0 2 0 2 127.0.0.1 3 1 1", "[rank 1] 1 2 1 2 127.0.0.1 3 1 1"],
    )


def test_ranks_share_a_port_but_no_host_id() -> None:
    _, _, said = lines(shell("echo $MASTER_PORT; echo host $NCCL_HOSTID"), OneGpu(3, timeout_s=30))
    assert len({line.split()[-1] for line in said if "host" not in line}) == 1
    assert len({line.split()[-1] for line in said if "host" in line}) == 3


def test_local_rank_zero_makes_every_rank_a_host_of_its_own() -> None:
    code, _, said = lines(shell("echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE"), OneGpu(2, local_rank="zero", timeout_s=30))
    assert (code, said) == (0, ["[rank 0] 0 0 1", "[rank 1] 1 0 1"])


def test_the_caller_can_add_and_override() -> None:
    options = OneGpu(1, env={"UB_SKIPMC": "0", "MINE": "yes"}, timeout_s=30)
    assert lines(shell("echo $UB_SKIPMC $MINE"), options)[2] == ["[rank 0] 0 yes"]


def test_a_setting_of_the_caller_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert lines(shell("echo $CUDA_DEVICE_MAX_CONNECTIONS"), OneGpu(1, timeout_s=30))[2] == ["[rank 0] 8"]


def test_the_first_failing_rank_gives_the_status_and_ends_the_others() -> None:
    start = time.monotonic()
    code, rank, _ = lines(shell("[ $RANK = 1 ] && exit 7; sleep 60"), OneGpu(3, timeout_s=30))
    assert (code, rank) == (7, 1)
    assert time.monotonic() - start < 20


def test_a_rank_that_a_signal_ended_counts_as_128_and_the_signal() -> None:
    code, rank, _ = lines(shell("[ $RANK = 0 ] && kill -9 $$; sleep 60"), OneGpu(2, timeout_s=30))
    assert (code, rank) == (137, 0)


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (0, 0), (7, 7), (-9, 137), (KeyboardInterrupt(), 130), (SystemExit(143), 143), (SystemExit(), 0),
        (SystemExit("a reason"), 1),
    ],
)  # fmt: skip
def test_exit_status(ended: int | KeyboardInterrupt | SystemExit, status: int) -> None:
    assert exit_status(ended) == status


def test_timeout_ends_everything() -> None:
    code, rank, said = lines(shell("echo up; sleep 61.5"), OneGpu(2, timeout_s=4.0, grace_s=0.5))
    assert (code, rank) == (TIMED_OUT, None)
    # A shell that sees its child end before itself says "Terminated".
    assert [line for line in said if not line.endswith("Terminated")] == ["[rank 0] up", "[rank 1] up"]
    assert pids_with("sleep\x0061.5") == []


def test_what_a_rank_started_in_another_session_is_ended_too() -> None:
    lines(shell("setsid sleep 62.5 & sleep 0.3; exit 3"), OneGpu(1, timeout_s=30, grace_s=0.5))
    assert pids_with("sleep\x0062.5") == []


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    script = "trap '' TERM; [ $RANK = 0 ] && sleep 0.3 && exit 5; while :; do sleep 0.1; done"
    assert lines(shell(script), OneGpu(2, timeout_s=30, grace_s=0.5))[:2] == (5, 0)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_outlives_a_launcher_that_is_ended(number: signal.Signals, status: int) -> None:
    seconds = f"63.{int(number)}"
    program = (
        # a shell's background jobs ignore Ctrl-C, and so do their children
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from ub_dynamic.testing.one_gpu import OneGpu, run; "
        f"run(['sh', '-c', 'sleep {seconds}'], OneGpu(2, grace_s=0.5))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": REPOSITORY},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(pids_with(f"sleep\x00{seconds}")) == 2)
        launcher.send_signal(number)
        launcher.wait(30)
        wait_until(lambda: not pids_with(f"sleep\x00{seconds}"))
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == status


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(UBStateError, match="no-such-program"):
        run(["no-such-program"], OneGpu(2))


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_a_count_that_makes_no_sense_is_refused(ranks: int) -> None:
    with pytest.raises(UBShapeError, match=str(ranks)):
        OneGpu(ranks)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "0", "-1"])
def test_a_timeout_that_makes_no_sense_is_refused(seconds: str) -> None:
    result = CliRunner().invoke(app, ["one-gpu", "--timeout", seconds, "--", "true"])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert f"timeout_s = {float(seconds)}: it is a positive, finite number of seconds, as 20 is" in result.output


def test_the_hint_for_scripts_that_choose_their_device_by_local_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines(shell("echo CUDA error: invalid device ordinal; exit 1"), OneGpu(1, timeout_s=30))
    assert "--local-rank zero" in capfd.readouterr().err


def test_the_label_is_loud(capfd: pytest.CaptureFixture[str]) -> None:
    lines(shell("true"), OneGpu(2, timeout_s=30))
    said = capfd.readouterr().err
    assert said.count("2 ranks share ONE GPU") == 2
    assert "timings against NCCL mean nothing" in said


def test_a_process_knows_that_it_is_in_such_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UB_DYNAMIC_ONE_GPU", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (active_ranks(), device()) == (None, "cuda:3")
    monkeypatch.setenv("UB_DYNAMIC_ONE_GPU", "4")
    assert (active_ranks(), device()) == (4, "cuda:0")
