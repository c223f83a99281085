# SPDX-License-Identifier: Apache-2.0
"""The one-GPU launcher's process handling, which needs no GPU: environments, failures, signals, MPS,
leftovers.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ub_dynamic import UBShapeError, UBStateError, UBUnsupportedError
from ub_dynamic.cli.app import app
from ub_dynamic.testing.marked import kill_marked, marked_pids, new_mark, shared_files
from ub_dynamic.testing.mps import Keeper
from ub_dynamic.testing.one_gpu import TIMED_OUT, OneGpu, active_ranks, device, run
from ub_dynamic.testing.peer_access import peer_access_library

REPOSITORY = str(Path(__file__).resolve().parents[2])


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def lines(command: list[str], options: OneGpu) -> tuple[int, int | None, list[str]]:
    output = io.BytesIO()
    outcome = run(command, options, output)
    return outcome.returncode, outcome.failed_rank, sorted(output.getvalue().decode().splitlines())


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


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


def is_alive(pid: int) -> bool:
    """Not gone and no zombie, whose command line is empty."""
    try:
        return bool(Path("/proc", str(pid), "cmdline").read_bytes())
    except OSError:
        return False


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


class TestMps:
    """With a stand-in for NVIDIA's control program that behaves like it: a daemon with a pid file, and
    orders.
    """

    CONTROL = """\
#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
  [ -n "$FAIL" ] && { echo no such driver; exit 1; }
  python3 -c "
import os, sys, time
if os.fork(): sys.exit()
os.setsid()
open('$pipe/nvidia-cuda-mps-control.pid', 'w').write(str(os.getpid()))
sys.stdout.flush()
os.execv('/bin/sleep', ['nvidia-cuda-mps-control', '64.5'])"
  while [ ! -s $pipe/nvidia-cuda-mps-control.pid ]; do sleep 0.02; done
else
  read order
  echo "$order" >> $LOG
  [ "$order" = quit ] && [ -z "$DEAF" ] && kill $(cat $pipe/nvidia-cuda-mps-control.pid)
fi
exit 0
"""

    @pytest.fixture(autouse=True)
    def control(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(self.CONTROL)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("LOG", str(tmp_path / "orders"))
        return tmp_path

    def test_the_daemon_is_there_for_the_run_and_gone_after_it(self, control: Path) -> None:
        script = "cat $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid; echo; echo $CUDA_MPS_LOG_DIRECTORY"
        code, _, said = lines(shell(script), OneGpu(1, mps=True, timeout_s=30))
        folder, pid = (line.split()[-1] for line in said)
        assert code == 0
        assert folder.endswith("/log")
        assert not Path(folder).parent.exists()
        assert not is_alive(int(pid))
        assert (control / "orders").read_text().split() == ["get_server_list", "quit"]

    def test_a_daemon_of_the_environment_is_shared_and_left_alone(
        self, control: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keeper = Keeper(new_mark(), mps=True)
        for name, value in keeper.environment.items():
            monkeypatch.setenv(name, value)
        script = "cat $CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid; echo"
        pids = {said for _ in range(2) for said in lines(shell(script), OneGpu(1, mps=True, timeout_s=30))[2]}
        assert len(pids) == 1
        assert is_alive(int(pids.pop().split()[-1]))
        assert not (control / "orders").exists()
        keeper.close()
        # one that has ended is not taken for one that runs
        other = Keeper(new_mark(), mps=True)
        assert other.environment["CUDA_MPS_PIPE_DIRECTORY"] != keeper.environment["CUDA_MPS_PIPE_DIRECTORY"]
        other.close()

    def test_a_daemon_that_does_not_quit_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DEAF", "1")
        keeper = Keeper(new_mark(), mps=True, quit_s=0.3)
        pipe = Path(keeper.environment["CUDA_MPS_PIPE_DIRECTORY"])
        pid = int((pipe / "nvidia-cuda-mps-control.pid").read_text())
        assert is_alive(pid)
        keeper.close()
        wait_until(lambda: not is_alive(pid))

    def test_a_failing_rank_does_not_leave_the_daemon(self, control: Path) -> None:
        script = "cat $CUDA_MPS_PIPE_DIRECTORY/*.pid; echo; exit 9"
        code, _, said = lines(shell(script), OneGpu(1, mps=True, timeout_s=30))
        assert code == 9
        assert not is_alive(int(said[0].split()[-1]))

    def test_one_that_does_not_start_is_an_error_with_its_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAIL", "1")
        with pytest.raises(UBUnsupportedError, match="no such driver"):
            run(["true"], OneGpu(1, mps=True))

    def test_no_control_program_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ub_dynamic.testing.mps.CONTROL", "no-such-control")
        with pytest.raises(UBUnsupportedError, match="no-such-control"):
            run(["true"], OneGpu(1, mps=True))


class TestPeerAccess:
    def test_the_answer_is_yes(self, tmp_path: Path) -> None:
        library = ctypes.CDLL(str(peer_access_library(tmp_path)))
        answer = ctypes.c_int(0)
        assert library.cudaDeviceCanAccessPeer(ctypes.byref(answer), 0, 7) == 0
        assert answer.value == 1

    def test_builds_at_the_same_time_do_not_meet(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: peer_access_library(tmp_path), range(8)))
        assert len(found) == 1
        assert [path.name for path in tmp_path.iterdir()] == [found.pop().name]

    @pytest.mark.parametrize("kept", [0, 4, 100, 3000, None])
    def test_a_damaged_one_is_built_again(self, tmp_path: Path, kept: int | None) -> None:
        library = peer_access_library(tmp_path)
        whole = library.read_bytes()
        library.write_bytes(b"garbage" if kept is None else whole[:kept])
        assert peer_access_library(tmp_path) == library
        assert library.read_bytes() == whole
        made = library.stat().st_ino
        assert peer_access_library(tmp_path).stat().st_ino == made  # a good one is left as it is

    def test_another_library_is_no_answer(self, tmp_path: Path) -> None:
        library = peer_access_library(tmp_path)
        source = tmp_path / "no.c"
        source.write_text("int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return a + b; }")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
        found = ctypes.CDLL(str(peer_access_library(tmp_path)))
        assert found.cudaDeviceCanAccessPeer(ctypes.byref(ctypes.c_int()), 0, 7) == 0

    def test_a_folder_that_nothing_is_preloaded_from_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "two words"
        folder.mkdir()
        with pytest.raises(UBUnsupportedError, match=r"(?s)cannot be preloaded: .*no space and no colon"):
            peer_access_library(folder)
        assert list(folder.iterdir()) == []

    def test_without_a_compiler_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", "no-such-compiler")
        with pytest.raises(UBUnsupportedError, match="no-such-compiler"):
            peer_access_library(tmp_path)

    def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CC", "false")
        with pytest.raises(UBUnsupportedError, match="failed with 1"):
            peer_access_library(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_marked_processes_are_found_and_ended() -> None:
    mark = new_mark()
    process = subprocess.Popen(["sh", "-c", "setsid sleep 65.5 & sleep 65.5"], env={**os.environ, **mark})
    wait_until(lambda: len(marked_pids(mark)) == 3)
    kill_marked(mark, grace_s=1.0)
    process.wait(10)
    assert marked_pids(mark) == ()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in /dev/shm here")
def test_files_in_shared_memory_end_with_the_processes_that_alone_have_them() -> None:
    name, kept = (Path("/dev/shm", f"ub_dynamic_test_{os.getpid()}_{word}") for word in ("gone", "kept"))
    program = (
        "import mmap, sys, time\n"
        "files = [open(path, 'r+b') for path in sys.argv[1:]]\n"
        "held = [mmap.mmap(file.fileno(), 16) for file in files]\n"
        "time.sleep(60)"
    )
    mark = new_mark()
    try:
        for path in (name, kept):
            path.write_bytes(bytes(16))
        with kept.open("r+b") as file, mmap.mmap(file.fileno(), 16):
            command = [sys.executable, "-c", program, str(name), str(kept)]
            process = subprocess.Popen(command, env={**os.environ, **mark})
            wait_until(lambda: shared_files(marked_pids(mark)) == {str(name), str(kept)})
            kill_marked(mark, grace_s=1.0)
            process.wait()
            assert not name.exists()
            assert kept.exists(), "another process has it too"
    finally:
        name.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
