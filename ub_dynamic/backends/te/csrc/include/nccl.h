// SPDX-License-Identifier: Apache-2.0
// Stand-in for NCCL's header: one opaque handle is named in a constructor that is not called.
#pragma once

typedef struct ncclComm *ncclComm_t;
