// SPDX-License-Identifier: Apache-2.0
// Prints the layout of Transformer Engine's communicator classes, as a translation unit with these headers sees it.
#include <transformer_engine/comm_gemm_overlap.h>

#include <cstddef>
#include <cstdio>

namespace te = transformer_engine;

struct Core : te::CommOverlapCore {
  static void print() {
    std::printf("Core %zu\n", sizeof(te::CommOverlapCore));
    std::printf("_num_splits %zu\n", offsetof(Core, _num_splits));
    std::printf("_ub_reg %zu\n", offsetof(Core, _ub_reg));
    std::printf("_ubuf %zu\n", offsetof(Core, _ubuf));
    std::printf("_stream_compute %zu\n", offsetof(Core, _stream_compute));
    std::printf("_comm_launch_event %zu\n", offsetof(Core, _comm_launch_event));
  }
};

struct P2P : te::CommOverlapP2PBase {
  static void print() {
    std::printf("P2P %zu\n", sizeof(te::CommOverlapP2PBase));
    std::printf("_ubufs %zu\n", offsetof(P2P, _ubufs));
    std::printf("_stop_recv %zu\n", offsetof(P2P, _stop_recv));
  }
};

int main() {
  Core::print();
  P2P::print();
  std::printf("Base %zu\n", sizeof(te::CommOverlapBase));
}
