# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon of a run: there for its ranks, and gone after them, whatever happens."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from processes import is_alive, lines, shell, wait_until

from ub_dynamic import UBUnsupportedError
from ub_dynamic.testing.marked import new_mark
from ub_dynamic.testing.mps import Keeper
from ub_dynamic.testing.one_gpu import OneGpu, run


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
