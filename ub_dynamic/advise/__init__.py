# SPDX-License-Identifier: Apache-2.0
"""What a workload, known by the lengths of its documents, would gain from an active shape. Needs numpy."""

from .distribution import Distribution
from .reading import read_lengths
from .report import Report, Strategy, Workload, advise
from .sentences import advice

__all__ = ["Distribution", "Report", "Strategy", "Workload", "advice", "advise", "read_lengths"]
