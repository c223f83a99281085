# SPDX-License-Identifier: Apache-2.0
"""What `doctor` says about the real Transformer Engine and megatron-core, on a machine without a GPU."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from ub_dynamic.backends.te import build
from ub_dynamic.cli import probes
from ub_dynamic.cp.capabilities import te_capabilities


def test_te_and_what_stands_beside_it() -> None:
    findings = {finding.name: finding for finding in probes._te()}
    assert findings["Transformer Engine"].found == metadata.version("transformer_engine")
    assert str(build.find_toolchain().te_include) == findings["TE headers"].found
    able = te_capabilities()
    assert ("p2p" in findings["TE's attention"].found) == able.thd_p2p
    assert ("a2a+p2p" in findings["TE's attention"].found) == able.thd_a2a_p2p
    assert (findings["TE backward patches"].state == "ok") == able.patches
    works = {ability.name: ability.works for ability in probes.abilities(probes.examine())}
    assert works["TE backend with an active shape"] == torch.cuda.is_available()


@pytest.mark.skipif(probes.installed("megatron-core") is None, reason="needs megatron-core")
def test_an_adapter_that_does_not_fit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes._megatron("TE backend").found == f"{metadata.version('megatron-core')}, the adapter fits"
    monkeypatch.setattr(probes, "_ask", lambda code: {"error": "UBUnsupportedError: no forward_step"})
    found = probes._megatron("TE backend")
    assert found.state == "broken" and "no forward_step" in found.found
