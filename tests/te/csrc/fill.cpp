// SPDX-License-Identifier: Apache-2.0
// Test helper: gives default-constructed communicator objects of the real library what their constructors give them
// on a GPU (TE's comm_gemm_overlap.cpp), over ordinary memory.
#include <pybind11/stl.h>

#include <iterator>
#include <vector>

#include "members.h"

namespace py = pybind11;

namespace ub_dynamic {
namespace {

struct Writable : te::CommOverlapCore {
  static constexpr auto rank = &Writable::_rank;
  static constexpr auto use_ce = &Writable::_use_ce;
  static constexpr auto is_p2p = &Writable::_is_p2p;
};

te::DType dtype_of(size_t itemsize) {
  return itemsize == 1 ? te::DType::kByte : itemsize == 2 ? te::DType::kBFloat16 : te::DType::kFloat32;
}

void fill(py::object communicator, size_t address, size_t tokens, size_t hidden, size_t itemsize, int tp, int tp_id,
          bool reduce_scatter, int num_splits, int num_sm, int region) {
  Handle handle(communicator);
  auto &core = *handle.core;
  core.*Core::tp_size = tp;
  core.*Core::tp_id = tp_id;
  core.*Core::num_splits = num_splits;
  core.*Core::num_comm_sm = num_sm;
  core.*Core::math_sms = 132 - num_sm;
  core.*Core::region = region;
  core.*Core::use_ce = handle.p2p != nullptr;
  core.*Writable::is_p2p = handle.p2p != nullptr;
  if (handle.base != nullptr && Base::first_gemm() != nullptr) handle.base->*Base::first_gemm() = false;
  auto *data = reinterpret_cast<char *>(address);
  const auto dtype = dtype_of(itemsize);
  size_t rows = tokens;
  if (handle.p2p != nullptr) {
    const size_t chunks = reduce_scatter ? 2 * tp - 1 : tp;
    const size_t chunk_rows = tokens / tp;
    rows = chunk_rows * chunks;
    handle.p2p->*P2P::is_reduce_scatter = reduce_scatter;
    handle.p2p->*P2P::aggregate = false;
    for (size_t i = 0; i < chunks; ++i) {
      (handle.p2p->*P2P::chunks)
          .push_back(te::TensorWrapper(data + i * chunk_rows * hidden * itemsize,
                                       std::vector<size_t>{chunk_rows, hidden}, dtype));
    }
  }
  core.*Core::ubuf = te::TensorWrapper(data, std::vector<size_t>{rows, hidden}, dtype);
}

// What stands behind the dimensions of a communicator's buffer and of its chunks, where nothing should.
std::vector<size_t> behind_shapes(py::object communicator) {
  Handle handle(communicator);
  std::vector<size_t> found;
  const auto look = [&found](const te::TensorWrapper &tensor) {
    const auto shape = tensor.shape();
    for (size_t i = shape.ndim; i < std::size(shape.data); ++i) {
      if (shape.data[i] != 0) found.push_back(shape.data[i]);
    }
  };
  look(handle.core->*Core::ubuf);
  if (handle.p2p != nullptr) {
    for (const auto &chunk : handle.p2p->*P2P::chunks) look(chunk);
  }
  return found;
}

}  // namespace
}  // namespace ub_dynamic

PYBIND11_MODULE(fill, m) {
  m.def("fill", &ub_dynamic::fill);
  m.def("behind_shapes", &ub_dynamic::behind_shapes);
}
