# SPDX-License-Identifier: Apache-2.0
"""Tests against the real Transformer Engine and megatron-core, without a GPU: they import, kernels cannot run."""

from __future__ import annotations

import importlib

collect_ignore_glob: list[str] = []
_HEADER: list[str] = []
# Megatron needs Transformer Engine, and is asked only if that imports.
for _package, _tests in (("transformer_engine.pytorch", "test_*.py"), ("megatron.core", "test_megatron_*.py")):
    try:
        importlib.import_module(_package)
    except ImportError as error:
        collect_ignore_glob.append(_tests)
        _HEADER.append(f"{_package} does not import: {error}")
        break
    _HEADER.append(f"{_package} imports")


def pytest_report_header() -> str:
    return ", ".join(_HEADER)
