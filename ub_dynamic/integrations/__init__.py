# SPDX-License-Identifier: Apache-2.0
"""Adapters for training frameworks: each reads T where that framework has it, so that its scripts need not change."""
