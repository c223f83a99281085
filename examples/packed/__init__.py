# SPDX-License-Identifier: Apache-2.0
"""The parts of ``train_packed.py``: data, model, train, report."""
