// SPDX-License-Identifier: Apache-2.0
// The fast path of a change of shape: whether it may be made, and the other ranks told of it, in one call.
//
// What is asked, and every error, are those of ub_dynamic/manager.py. This only answers whether all is well; where it
// is not, the Python side looks again and says what is wrong.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "board.h"

namespace ub_dynamic {

namespace py = pybind11;

class Ready {
 public:
  // `board`: the native one, or None. `lent`, `enqueuing`, `captures`: the guard's own, empty while nothing is under
  // way. `capturing`: Transformer Engine's function that says whether it captures, or None. The valid numbers of
  // tokens are multiples of `multiple` from `minimum` to `maximum`.
  Ready(py::object board, py::dict lent, py::dict enqueuing, py::dict captures, py::object capturing,
        std::int64_t multiple, std::int64_t minimum, std::int64_t maximum)
      : owner_(std::move(board)), board_(owner_.is_none() ? nullptr : owner_.cast<Board *>()), lent_(std::move(lent)),
        enqueuing_(std::move(enqueuing)), captures_(std::move(captures)), capturing_(std::move(capturing)),
        multiple_(multiple), minimum_(minimum), maximum_(maximum) {
    if (multiple < 1) throw py::value_error("multiple must be at least 1");
  }

  using Answer = Board::Answer;

  // Whether all communicators may have that many tokens from now on, which is published then.
  Answer ask(std::int64_t tokens) {
    if (tokens < minimum_ || tokens > maximum_ || tokens % multiple_ != 0) return Answer::kNotMade;
    if (!empty(lent_) || !empty(enqueuing_) || !empty(captures_) || te_captures()) return Answer::kNotMade;
    return board_ == nullptr ? Answer::kAgreed : board_->exchange(tokens);
  }

 private:
  static bool empty(const py::dict &under_way) { return PyDict_GET_SIZE(under_way.ptr()) == 0; }

  bool te_captures() const {
    if (capturing_.is_none()) return false;
    const auto answer = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(capturing_.ptr()));
    if (!answer) throw py::error_already_set();
    return answer.ptr() != Py_False;
  }

  py::object owner_;
  Board *board_;  // of owner_
  py::dict lent_, enqueuing_, captures_;
  py::object capturing_;
  std::int64_t multiple_, minimum_, maximum_;
};

}  // namespace ub_dynamic
