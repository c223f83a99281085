# SPDX-License-Identifier: Apache-2.0
"""Context parallelism on packed batches."""
