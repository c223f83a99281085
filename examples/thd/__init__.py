# SPDX-License-Identifier: Apache-2.0
"""The parts of ``te_thd_training.py`` that are Transformer Engine's: model and training; the rest is
``packed``.
"""
