# SPDX-License-Identifier: Apache-2.0
"""Plain `pytest` is enough: tests marked `mpi` start their ranks; `gpu` and `te` say why they skip."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

pytest_plugins = ["ub_dynamic.testing.mpi_plugin"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n 2`: what starts ranks or uses a GPU, in one worker; all else, file by file, in the other."""
    from xdist.scheduler import LoadScopeScheduling

    class RanksInOneWorker(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(("tests/mpi/", "tests/gpu/")) else nodeid.split("::")[0]

    return RanksInOneWorker(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch.cuda.is_available() is False here")
    if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine: pip install 'ub_dynamic[te]'")
