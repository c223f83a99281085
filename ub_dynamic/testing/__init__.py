# SPDX-License-Identifier: Apache-2.0
"""What tests of variable-T overlap need: real processes, references, random operation sequences."""
