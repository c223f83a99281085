# SPDX-License-Identifier: Apache-2.0
"""Plain `pytest` is enough: tests marked `mpi` start their ranks; `gpu` and `te` say why they skip."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

pytest_plugins = ["ub_dynamic.testing.mpi_plugin"]

# They keep every processor busy with several ranks that wait for each other; the others mostly start processes.
BUSY = tuple(f"tests/mpi/test_{name}" for name in ("cp_", "groups", "host_", "initialize", "pipeline_"))
WAITING = tuple(f"tests/mpi/test_{name}.py" for name in ("host_faults", "pipeline_faults", "pipeline_killed"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n 2`: two tests that keep several ranks busy, or a GPU, never run at the same time."""
    from xdist.scheduler import LoadScopeScheduling

    class BusyRanksInOneWorker(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            busy = file.startswith((*BUSY, "tests/gpu/")) and file not in WAITING
            return "busy ranks" if busy else file

    return BusyRanksInOneWorker(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch.cuda.is_available() is False here")
    if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine: pip install 'ub_dynamic[te]'")
