# SPDX-License-Identifier: Apache-2.0
"""Measuring: interleaved arms, operations against their peers, whole steps, and the tuner that makes a table."""
