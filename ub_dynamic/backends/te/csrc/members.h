// SPDX-License-Identifier: Apache-2.0
// Access to the protected members of Transformer Engine's communicators that describe their buffers.
//
// A derived class may form pointers to the protected members that it inherits. The compiler resolves them from
// the class declaration of the installed version, so no layout is assumed, and a renamed member does not compile.
#pragma once

#include <pybind11/pybind11.h>
#include <transformer_engine/comm_gemm_overlap.h>

#include <stdexcept>

namespace ub_dynamic {

namespace te = transformer_engine;

struct Core : te::CommOverlapCore {
  static constexpr auto tp_id = &Core::_tp_id;
  static constexpr auto tp_size = &Core::_tp_size;
  static constexpr auto num_splits = &Core::_num_splits;
  static constexpr auto math_sms = &Core::_math_sms;
  static constexpr auto num_comm_sm = &Core::_num_comm_sm;
  static constexpr auto use_ce = &Core::_use_ce;
  static constexpr auto region = &Core::_ub_reg;
  static constexpr auto is_p2p = &Core::_is_p2p;
  static constexpr auto atomic_gemm = &Core::_atomic_gemm;
  static constexpr auto ubuf = &Core::_ubuf;
  static constexpr auto stream_compute = &Core::_stream_compute;

  // One communicator of the process, shared by all objects; the first object that dies destroys it.
  static bool shared_exists() { return _comm_created; }
};

struct Base : te::CommOverlapBase {
  using Flag = bool te::CommOverlapBase::*;

  // Null where this version of Transformer Engine has no such member.
  static constexpr Flag first_gemm() { return find<Base>(nullptr); }

 private:
  template <class Self>
  static constexpr Flag find(decltype(&Self::_rs_overlap_first_gemm) *) { return &Self::_rs_overlap_first_gemm; }
  template <class Self>
  static constexpr Flag find(...) { return nullptr; }
};

struct P2P : te::CommOverlapP2PBase {
  static constexpr auto chunks = &P2P::_ubufs;
  static constexpr auto is_reduce_scatter = &P2P::_is_reduce_scatter;
  static constexpr auto aggregate = &P2P::_aggregate;
};

// A communicator object of Python. The module-local base classes of Transformer Engine's extension take a cast
// to the direct base of the object's class only, so each of the two is tried.
struct Handle {
  te::CommOverlapCore *core = nullptr;
  te::CommOverlapP2PBase *p2p = nullptr;  // null for a CommOverlap
  te::CommOverlapBase *base = nullptr;    // null for a CommOverlapP2P

  explicit Handle(pybind11::handle object) {
    pybind11::detail::make_caster<te::CommOverlapP2PBase> ring;
    if (ring.load(object, false)) {
      core = p2p = static_cast<te::CommOverlapP2PBase *>(ring);
      return;
    }
    pybind11::detail::make_caster<te::CommOverlapBase> other;
    if (other.load(object, false)) core = base = static_cast<te::CommOverlapBase *>(other);
    if (core == nullptr) {
      throw pybind11::type_error(
          "not a communicator of Transformer Engine, or one whose extension was built with another pybind11 ABI");
    }
  }
};

}  // namespace ub_dynamic
