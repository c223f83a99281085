// SPDX-License-Identifier: Apache-2.0
// Stand-in for CUDA's header: Transformer Engine's class declarations need these two opaque handles and no
// more, so that the native file compiles where no CUDA toolkit is installed (torch's packages lack crt/).
#pragma once

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
