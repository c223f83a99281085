# SPDX-License-Identifier: Apache-2.0
"""megatron-core with TP overlap on packed batches: call :func:`install` before Megatron initialises, that is all.

T is read from the tensors that enter Megatron's transformer blocks, the backward of each microbatch sees its own T in
every pipeline schedule, and ``pad_between_seqs`` is filled in. :func:`plan_batches` and :class:`Microbatch` make
Megatron's packed microbatches from lengths, :func:`graph_decoder` runs its decoder from one CUDA graph a shape.
"""

from .adapter import install, is_installed, uninstall
from .configuration import check_config
from .graphs import GraphedDecoder, graph_decoder
from .microbatches import Microbatch, plan_batches

__all__ = [
    "GraphedDecoder",
    "Microbatch",
    "check_config",
    "graph_decoder",
    "install",
    "is_installed",
    "plan_batches",
    "uninstall",
]
