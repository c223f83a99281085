// SPDX-License-Identifier: Apache-2.0
// Stand-in, see cuda_runtime_api.h: the FP8 types are not named in the class declarations.
#pragma once
