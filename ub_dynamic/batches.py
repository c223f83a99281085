# SPDX-License-Identifier: Apache-2.0
"""What a microbatch says of itself: its T, and the tensors in what a model made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


def tokens_of(batch: Any) -> Any:
    """T on the TP group: a packed batch's ``local_tokens`` (its share of context parallelism), its
    ``total_tokens`` where it has only that, or the number itself."""
    return getattr(batch, "local_tokens", getattr(batch, "total_tokens", batch))


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``output``: itself, or those in a list, tuple, dict or dataclass."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_of(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from tensors_of([getattr(output, each.name, None) for each in dataclasses.fields(output)])
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)
