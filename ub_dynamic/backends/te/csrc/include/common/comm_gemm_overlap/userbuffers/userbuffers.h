// SPDX-License-Identifier: Apache-2.0
// Stand-in for a header that comm_gemm_overlap.h includes but that Transformer Engine's wheels do not ship.
// Only what the class declarations name; nothing here is called.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>

struct communicator;
using ExtComm = const char *;
using ExtAllgatherOp = std::function<void(void *, std::size_t, void *, std::size_t, ExtComm)>;
using ExtBarrierOp = std::function<void(ExtComm)>;

#ifndef NVTE_ERROR
#define NVTE_ERROR(...) throw std::runtime_error("Transformer Engine: unsupported communicator operation")
#endif
