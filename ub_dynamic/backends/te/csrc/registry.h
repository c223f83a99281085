// SPDX-License-Identifier: Apache-2.0
// The communicators of a process that follow the active shape, and what changes all of them in one call.
//
// Besides the shape, a communicator reads its splits, its streaming multiprocessors and a few flags each time an
// overlap is enqueued, and Transformer Engine's modules look it up by name each time. A plan is a full set of these
// settings, together with the communicator that stands under each name; switching to one writes them.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "members.h"

namespace ub_dynamic {

namespace py = pybind11;

// Transformer Engine's own destroy_ub was called, past this package.
[[noreturn]] inline void refuse_state(const char *text) {
  PyErr_SetString(py::module_::import("ub_dynamic.errors").attr("UBStateError").ptr(), text);
  throw py::error_already_set();
}

inline void reshape(te::TensorWrapper &tensor, char *data, te::DType dtype, size_t rows, size_t hidden) {
  // Zeros behind its two dimensions, which the library copies too. Nothing is known to read them; but a step with bulk
  // overlaps, of two ranks on one H200, was 0.7 to 1.2 % slower with what happened to be there than with zeros or with
  // shapes that were never rewritten, in turns in one run.
  NVTEShape shape{};
  shape.ndim = 2;
  shape.data[0] = rows;
  shape.data[1] = hidden;
  tensor.set_rowwise_data(data, dtype, shape);
}

// The object, or null if it is gone.
inline py::object alive(const py::weakref &reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *object = nullptr;
  PyWeakref_GetRef(reference.ptr(), &object);
  return py::reinterpret_steal<py::object>(object);
#else
  PyObject *object = PyWeakref_GetObject(reference.ptr());
  return py::reinterpret_borrow<py::object>(object == Py_None ? nullptr : object);
#endif
}

// One communicator with all that a change of shape needs.
struct Entry {
  py::weakref reference;
  Handle handle;
  te::TensorWrapper *ubuf;
  std::vector<te::TensorWrapper> *chunks;  // null for a CommOverlap
  char *data;
  te::DType dtype;
  size_t hidden, row_bytes, tp, capacity;

  void apply(size_t tokens) {
    if (chunks == nullptr) {
      reshape(*ubuf, data, dtype, tokens, hidden);
      return;
    }
    const size_t rows = tokens / tp;
    reshape(*ubuf, data, dtype, rows * chunks->size(), hidden);
    char *position = data;
    for (auto &chunk : *chunks) {
      reshape(chunk, position, dtype, rows, hidden);
      position += rows * row_bytes;
    }
  }

  size_t tokens() const {
    const size_t rows = ubuf->size(0);
    return chunks == nullptr ? rows : rows / chunks->size() * tp;
  }

  void check(size_t tokens) const {
    if (tokens == 0 || tokens > capacity || tokens % tp != 0) {
      throw py::value_error("T = " + std::to_string(tokens) + " is not a multiple of tp = " + std::to_string(tp) +
                            " between 1 and " + std::to_string(capacity));
    }
    check_alive();
  }

  void check_alive() const {
    if (!alive(reference)) refuse_state("a communicator was destroyed behind the registry's back: call destroy_ub");
  }
};

// What one communicator is to do. A flag of -1 is one that it does not have.
struct Setting {
  size_t index;
  int num_splits, num_sm, math_sms, aggregate, first_gemm;

  void apply(const Handle &handle) const {
    auto &core = *handle.core;
    core.*Core::num_splits = num_splits;
    core.*Core::num_comm_sm = num_sm;
    core.*Core::math_sms = math_sms;
    if (aggregate >= 0) handle.p2p->*P2P::aggregate = aggregate != 0;
    if (first_gemm >= 0) handle.base->*Base::first_gemm() = first_gemm != 0;
  }
};

// A full set of settings, and per pair whether its second communicator stands under the name of the first.
struct Plan {
  std::vector<Setting> settings;
  std::vector<bool> exchanged;
};

// A key of Transformer Engine's table. It contains an enum, whose hash is a call of Python, so it is taken once.
struct Key {
  explicit Key(py::object key) : object(std::move(key)), hash(py::hash(object)) {}

  bool set(PyObject *table, const py::object &value) const {
#if PY_VERSION_HEX < 0x030D0000
    return _PyDict_SetItem_KnownHash(table, object.ptr(), value.ptr(), hash) == 0;
#else
    return PyDict_SetItem(table, object.ptr(), value.ptr()) == 0;
#endif
  }

  py::object object;
  Py_hash_t hash;
};

// Two communicators of one GEMM: where they are in Transformer Engine's table, and whether they are exchanged.
struct Pair {
  Key first_key, second_key;
  size_t first, second;
  bool exchanged;
};

// The communicators of the process that follow the active shape. Holds no reference to them.
class Registry {
 public:
  // Returns the index for apply_one. `capacity`: tokens that the buffer was registered for.
  size_t add(py::object communicator, size_t capacity) {
    Handle handle(communicator);
    auto &ubuf = handle.core->*Core::ubuf;
    const auto shape = ubuf.shape();
    if (shape.ndim != 2 || ubuf.dptr() == nullptr) throw std::runtime_error("its buffer is not a 2-D tensor");
    Entry entry{py::weakref(communicator), handle, &ubuf, nullptr, static_cast<char *>(ubuf.dptr()), ubuf.dtype(),
                shape.data[1], shape.data[1] * ubuf.element_size(),
                static_cast<size_t>(handle.core->*Core::tp_size), capacity};
    if (handle.p2p != nullptr) entry.chunks = &(handle.p2p->*P2P::chunks);
    if (entry.tp == 0 || (entry.chunks != nullptr && entry.chunks->empty()) || entry.tokens() != capacity) {
      throw std::runtime_error("its buffer does not have the shape that it was registered with");
    }
    entries_.push_back(std::move(entry));
    return entries_.size() - 1;
  }

  // Gives all communicators the active shape [tokens, H], or changes none and throws.
  void apply(size_t tokens) {
    for (auto &entry : entries_) entry.check(tokens);
    for (auto &entry : entries_) entry.apply(tokens);
  }

  void apply_one(size_t index, size_t tokens) {
    auto &entry = entries_.at(index);
    entry.check(tokens);
    entry.apply(tokens);
  }

  size_t active(size_t index) const {
    const auto &entry = entries_.at(index);
    entry.check_alive();
    return entry.tokens();
  }

  // T of the communicator at `index` as it is now; 0 if that is another object, or gone.
  size_t tokens(size_t index, PyObject *communicator) const {
    if (index >= entries_.size()) return 0;
    const auto &entry = entries_[index];
    return alive(entry.reference).ptr() == communicator ? entry.tokens() : 0;
  }

  // Transformer Engine's table of communicators is the value of `name` in `names`, its module's namespace. The
  // table itself is never held, since it holds the communicators.
  void use_table(py::dict names, py::str name) {
    namespace_ = std::move(names);
    name_ = std::move(name);
  }

  // Two communicators that can be exchanged in the table; returns the index of the pair.
  size_t pair(py::object first_key, py::object second_key, size_t first, size_t second) {
    entries_.at(first), entries_.at(second);
    pairs_.push_back(Pair{Key(std::move(first_key)), Key(std::move(second_key)), first, second, false});
    return pairs_.size() - 1;
  }

  // Each of `settings`: index, num_splits, num_sm, math_sms, aggregate, first_gemm.
  Plan plan(const std::vector<std::array<int, 6>> &settings, const std::vector<bool> &exchanged) const {
    Plan made{{}, exchanged};
    if (exchanged.size() != pairs_.size()) throw py::value_error("a plan says of every pair whether it is exchanged");
    for (const auto &[index, num_splits, num_sm, math_sms, aggregate, first_gemm] : settings) {
      const auto &handle = entries_.at(index).handle;
      const bool foreign = (aggregate >= 0 && handle.p2p == nullptr) ||
                           (first_gemm >= 0 && (handle.base == nullptr || Base::first_gemm() == nullptr));
      if (foreign) throw py::value_error("a flag that its communicator does not have");
      if (num_splits < 1 || num_sm < 1 || math_sms < 1) {
        throw py::value_error("num_splits, num_sm and math_sms must be at least 1");
      }
      made.settings.push_back({static_cast<size_t>(index), num_splits, num_sm, math_sms, aggregate, first_gemm});
    }
    return made;
  }

  // Lets all communicators do as the plan says, or changes nothing and throws. Allocates nothing.
  void switch_to(const Plan &plan) {
    if (plan.exchanged.size() != pairs_.size()) throw std::runtime_error("the plan is another registry's");
    for (const auto &setting : plan.settings) entries_.at(setting.index).check_alive();
    for (const auto &pair : pairs_) entries_[pair.first].check_alive(), entries_[pair.second].check_alive();
    PyObject *table = pairs_.empty() ? nullptr : PyDict_GetItemWithError(namespace_.ptr(), name_.ptr());
    if (!pairs_.empty() && (table == nullptr || !PyDict_Check(table))) {
      refuse_state("Transformer Engine's table of communicators is gone: call destroy_ub");
    }
    for (size_t i = 0; i < pairs_.size(); ++i) {
      if (pairs_[i].exchanged != plan.exchanged[i]) exchange(table, pairs_[i]);
    }
    for (const auto &setting : plan.settings) setting.apply(entries_[setting.index].handle);
  }

  void clear() {
    entries_.clear();
    pairs_.clear();
  }
  size_t size() const { return entries_.size(); }

 private:
  void exchange(PyObject *table, Pair &pair) {
    // Both are held until both stand in the table: the table may be all that keeps them alive.
    const py::object first = alive(entries_[pair.first].reference), second = alive(entries_[pair.second].reference);
    const bool exchanged = !pair.exchanged;
    const bool done = pair.first_key.set(table, exchanged ? second : first) &&
                      pair.second_key.set(table, exchanged ? first : second);
    if (!done) throw py::error_already_set();
    pair.exchanged = exchanged;
  }

  std::vector<Entry> entries_;
  std::vector<Pair> pairs_;
  py::dict namespace_;
  py::str name_;
};

}  // namespace ub_dynamic

