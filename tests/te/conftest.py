# SPDX-License-Identifier: Apache-2.0
"""Tests against the real Transformer Engine, without a GPU: it imports, its kernels cannot run."""

from __future__ import annotations

try:
    import transformer_engine.pytorch  # noqa: F401
except ImportError as error:
    collect_ignore_glob = ["test_*.py"]
    _REASON = f"Transformer Engine does not import: {error}"
else:
    _REASON = ""


def pytest_report_header() -> str:
    return _REASON or "Transformer Engine imports"
