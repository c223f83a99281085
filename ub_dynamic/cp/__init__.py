# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on packed batches: TE's attention with what the host knows, and attention of our own."""

from .boundary_tables import unseen_keys
from .capabilities import Capabilities, te_capabilities
from .choose import Candidate, CPPlan, CPProblem, choose_cp_comm
from .cost import Cost, Links
from .current import PackedScope, current_batch, packed
from .hierarchical import HierarchicalTHDAttention
from .kernels import AttentionKernel
from .pad_flag import PadResolver, resolve_pad_between_seqs
from .pad_hooks import PadHandle, install_pad_resolver
from .partition import Partition
from .rope import rope_kwargs, table_rows
from .scatter import gather, scatter
from .te_patches import TEPatches, te_backward_patches

__all__ = [
    "AttentionKernel",
    "CPPlan",
    "CPProblem",
    "Candidate",
    "Capabilities",
    "Cost",
    "HierarchicalTHDAttention",
    "Links",
    "PackedScope",
    "PadHandle",
    "PadResolver",
    "Partition",
    "TEPatches",
    "choose_cp_comm",
    "current_batch",
    "gather",
    "install_pad_resolver",
    "packed",
    "resolve_pad_between_seqs",
    "rope_kwargs",
    "scatter",
    "table_rows",
    "te_backward_patches",
    "te_capabilities",
    "unseen_keys",
]
