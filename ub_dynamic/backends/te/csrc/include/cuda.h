// SPDX-License-Identifier: Apache-2.0
// Stand-in, see cuda_runtime_api.h.
#pragma once

#include "cuda_runtime_api.h"
