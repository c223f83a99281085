# SPDX-License-Identifier: Apache-2.0
"""What the tests in ranks that torchrun starts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def gloo_world() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()
