# SPDX-License-Identifier: Apache-2.0
"""What a microbatch says of itself: its T, and the tensors in what a model made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch

from .errors import UBStateError


def tokens_of(batch: Any) -> Any:
    """T on the TP group: a packed batch's ``local_tokens`` (its share of context parallelism), its
    ``total_tokens`` where it has only that, or the number itself."""
    return getattr(batch, "local_tokens", getattr(batch, "total_tokens", batch))


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``output``: itself, or those in a list, tuple, dict or dataclass, however deep.

    What is held in several places is looked into once. :class:`UBStateError` for one that contains itself.
    """
    above: dict[int, Iterator[Any]] = {0: iter((output,))}  # by id of each container around: its parts still to come
    seen: dict[int, Any] = {}  # containers by id, kept alive so that no other one gets their id
    while above:
        holder, parts = next(reversed(above.items()))
        for part in parts:
            if isinstance(part, torch.Tensor):
                yield part
            elif id(part) in above:
                raise UBStateError(
                    f"the output holds a {type(part).__name__} that contains itself; pass a tensor, or tensors in a "
                    "list, tuple, dict or dataclass that does not"
                )
            elif id(part) not in seen and (inside := _parts(part)):
                seen[id(part)] = part
                above[id(part)] = iter(inside)
                break
        else:
            del above[holder]


def _parts(output: Any) -> Collection[Any]:
    if isinstance(output, dict):
        return output.values()
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, each.name, None) for each in dataclasses.fields(output)]
    return output if isinstance(output, (list, tuple)) else ()
