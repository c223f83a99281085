# SPDX-License-Identifier: Apache-2.0
"""What a microbatch says of itself: its T, and the tensors in what a model made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .errors import UBStateError


def tokens_of(batch: Any) -> Any:
    """T on the TP group: a packed batch's ``local_tokens`` (its share of context parallelism), its
    ``total_tokens`` where it has only that, or the number itself."""
    return getattr(batch, "local_tokens", getattr(batch, "total_tokens", batch))


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``output``: itself, or those in a list, tuple, dict or dataclass.

    :class:`UBStateError` for one that contains itself.
    """
    return _tensors_of(output, ())


def _tensors_of(output: Any, around: tuple[int, ...]) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
        return
    if id(output) in around:
        raise UBStateError(
            f"the output holds a {type(output).__name__} that contains itself; pass a tensor, or tensors in a list, "
            "tuple, dict or dataclass that does not"
        )
    for part in _parts(output):
        yield from _tensors_of(part, (*around, id(output)))


def _parts(output: Any) -> Iterable[Any]:
    if isinstance(output, dict):
        return output.values()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, each.name, None) for each in dataclasses.fields(output)]
    return output if isinstance(output, (list, tuple)) else ()
