# SPDX-License-Identifier: Apache-2.0
"""What moves the bytes: the host backend (CPU, messages) and the TE backend (UserBuffers on GPUs)."""
