# SPDX-License-Identifier: Apache-2.0
"""The parts of ``megatron_gpt.py``: settings, megatron-core's model and optimizer, training, pictures."""
