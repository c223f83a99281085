// SPDX-License-Identifier: Apache-2.0
// The fast path of the guard: a call whose operands agree with the active shape is passed on as it came.
//
// What is checked, and every error, are those of ub_dynamic/backends/te/guard.py. This only answers whether all is
// well; every other call goes to the Python wrapper, which looks again and says what is wrong. Both keep the same
// dictionaries of what is under way.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "direct.h"
#include "registry.h"

namespace ub_dynamic {

// Positions in generic_gemm; Transformer Engine passes the last four by keyword.
enum Argument : Py_ssize_t { kA = 0, kTransA = 1, kB = 2, kComm = 16, kCommType = 17, kExtra = 18, kBulk = 19 };

// What a wrapped function was called with, passed on untouched. `kwargs` may be null.
struct Arguments {
  PyObject *args, *kwargs;

  // Borrowed; null if it was not given.
  PyObject *get(Py_ssize_t position, PyObject *name) const {
    if (position < PyTuple_GET_SIZE(args)) return PyTuple_GET_ITEM(args, position);
    return kwargs == nullptr ? nullptr : PyDict_GetItemWithError(kwargs, name);
  }
};

class Gate {
 public:
  // The two functions that a call may take.
  struct Way {
    py::object original, slow;
  };
  // `lent`, `enqueuing`: the guard's own. `gather`, `scatter`: members of CommOverlapType.
  Gate(py::object registry, py::dict lent, py::dict enqueuing, py::object gather, py::object scatter)
      : owner_(std::move(registry)), registry_(owner_.cast<const Registry *>()), lent_(std::move(lent)),
        enqueuing_(std::move(enqueuing)), gather_(std::move(gather)), scatter_(std::move(scatter)) {}

  // A communicator that the fast path may pass. `index`: of the registry. `kinds`: keys of `runs()` for all-gather and
  // reduce-scatter that overlap a GEMM, and for both in bulk.
  void add(py::handle communicator, py::str name, size_t index, size_t hidden, size_t tp, bool splits, bool copies,
           bool lends, std::vector<py::object> kinds) {
    if (kinds.size() != 4) throw py::value_error("there are four kinds of overlap");
    uses_.insert_or_assign(communicator.ptr(),
                           Use{std::move(name), index, hidden, tp, splits, copies, lends, std::move(kinds), {}});
  }

  // How often an overlap of each kind was enqueued. Counted here: to count in a dictionary takes longer than the check.
  py::dict runs() const {
    py::dict found;
    for (const auto &[communicator, use] : uses_) {
      for (size_t kind = 0; kind < use.runs.size(); ++kind) {
        if (use.runs[kind] > 0) found[use.kinds[kind]] = use.runs[kind];
      }
    }
    return found;
  }

  // From now on every call is passed on; what belongs to the guard is let go of. The uses stay, since a call may be in
  // the middle of one.
  void clear() {
    cleared_ = true;
    for (auto &[communicator, use] : uses_) use.runs = {};
    lent_ = enqueuing_ = py::dict();
  }

  // generic_gemm(...) of Transformer Engine's extension.
  PyObject *gemm(const Way &way, const Arguments &given) {
    PyObject *comm = given.get(kComm, names().comm);
    if (comm == nullptr || comm == Py_None) {
      const bool looks = PyDict_GET_SIZE(lent_.ptr()) > 0;
      return call(looks ? way.slow : way.original, given);
    }
    Use *use = find(comm);
    const int kind = use == nullptr ? -1 : well(*use, comm, given);
    if (kind < 0) return call(cleared_ ? way.original : way.slow, given);
    if (PyDict_GET_SIZE(lent_.ptr()) > 0 && PyDict_Contains(lent_.ptr(), use->name.ptr()) == 1) {
      PyDict_DelItem(lent_.ptr(), use->name.ptr());
    }
    const py::int_ thread(PyThread_get_thread_ident());
    const py::dict enqueuing = enqueuing_;  // held: the call may take the guard away
    enqueuing[thread] = use->name;
    PyObject *result = call(way.original, given);
    PyObject *type, *value, *trace;  // an exception of the call stays what it is
    PyErr_Fetch(&type, &value, &trace);
    if (PyDict_DelItem(enqueuing.ptr(), thread.ptr()) != 0) PyErr_Clear();
    PyErr_Restore(type, value, trace);
    if (result != nullptr) ++use->runs[static_cast<size_t>(kind)];
    return result;
  }

  // copy_into_buffer(communicator, input, local_chunk=False)
  PyObject *copy(const Way &way, const Arguments &given) {
    PyObject *comm = given.get(0, names().self);
    const Use *use = find(comm);
    if (use == nullptr) return call(cleared_ ? way.original : way.slow, given);
    PyObject *input = given.get(1, names().input);
    const int local = truth(given.get(2, names().local_chunk), 0);
    const Size size = input != nullptr && use->copies && local >= 0 ? size_of(input) : Size{};
    return call(size.known && holds(*use, comm, size, local == 1) ? way.original : way.slow, given);
  }

  // get_buffer(communicator, local_chunk=False, shape=None)
  PyObject *get_buffer(const Way &way, const Arguments &given) {
    PyObject *comm = given.get(0, names().self);
    const Use *use = find(comm);
    if (use == nullptr) return call(cleared_ ? way.original : way.slow, given);
    PyObject *shape = given.get(2, names().shape);
    const int local = truth(given.get(1, names().local_chunk), 0);
    const bool named = shape != nullptr && shape != Py_None;
    bool fits = use->copies && local >= 0;
    if (fits && named) {
      const Size size = size_in(shape);
      fits = size.known && holds(*use, comm, size, local == 1);
    }
    if (!fits) return call(way.slow, given);
    const bool lends = local == 0 && (named || use->lends);
    const py::dict lent = lent_;
    PyObject *view = call(way.original, given);
    if (view != nullptr && lends) lent[use->name] = py::weakref(view);
    return view;
  }

 private:
  struct Use {
    py::str name;
    size_t index, hidden, tp;
    bool splits;  // a GEMM + reduce-scatter through it is what it was registered for
    bool copies;  // its buffer is a [T, H] that operands are copied into
    bool lends;   // its buffer is handed out before a shape is named
    std::vector<py::object> kinds;
    std::array<std::int64_t, 4> runs;
  };

  // Of a tensor as a matrix: all dimensions but the last together, and the last.
  struct Size {
    size_t rows = 0, columns = 0;
    bool known = false;
  };

  // Names of arguments and attributes, made once.
  struct Names {
    static PyObject *make(const char *name) { return PyUnicode_InternFromString(name); }
    PyObject *a = make("A"), *b = make("B"), *trans_a = make("transA"), *comm = make("comm_overlap"),
             *comm_type = make("comm_type"), *extra = make("extra_output"), *bulk = make("bulk_overlap"),
             *self = make("self"), *input = make("input"), *local_chunk = make("local_chunk"), *shape = make("shape");
  };

  static const Names &names() {
    static const Names all;
    return all;
  }

  Use *find(PyObject *communicator) {
    if (cleared_) return nullptr;
    const auto found = uses_.find(communicator);
    return found == uses_.end() ? nullptr : &found->second;
  }

  static PyObject *call(const py::object &function, const Arguments &given) {
    const py::object held = function;  // the call may take the guard away
    return PyObject_Call(held.ptr(), given.args, given.kwargs);
  }

  // 0 or 1 for a bool, `absent` for no argument, -1 for anything else.
  static int truth(PyObject *value, int absent) {
    if (value == nullptr) return absent;
    return value == Py_True ? 1 : value == Py_False ? 0 : -1;
  }

  static Size size_in(PyObject *shape) {
    Size size;
    const bool tuple = PyTuple_Check(shape), list = PyList_Check(shape);
    const Py_ssize_t count = tuple ? PyTuple_GET_SIZE(shape) : list ? PyList_GET_SIZE(shape) : 0;
    size.rows = 1;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject *item = tuple ? PyTuple_GET_ITEM(shape, i) : PyList_GET_ITEM(shape, i);
      const Py_ssize_t value = PyLong_CheckExact(item) ? PyLong_AsSsize_t(item) : -1;
      if (value < 0) {
        PyErr_Clear();
        return Size{};
      }
      (i + 1 < count ? size.rows : size.columns) = (i + 1 < count ? size.rows : 1) * static_cast<size_t>(value);
    }
    size.known = count > 0;
    return size;
  }

  static Size size_of(PyObject *tensor) {
    PyObject *shape = PyObject_GetAttr(tensor, names().shape);
    if (shape == nullptr) {
      PyErr_Clear();
      return Size{};
    }
    const Size size = size_in(shape);
    Py_DECREF(shape);
    return size;
  }

  bool holds(const Use &use, PyObject *communicator, const Size &size, bool local_chunk) const {
    const size_t tokens = registry_->tokens(use.index, communicator), numel = size.rows * size.columns;
    return tokens > 0 && (local_chunk ? numel * use.tp : numel) == tokens * use.hidden;
  }

  // Which kind of overlap it is, or -1 where Python has to look.
  int well(const Use &use, PyObject *communicator, const Arguments &given) const {
    PyObject *type = given.get(kCommType, names().comm_type);
    const int bulk = truth(given.get(kBulk, names().bulk), 0);
    if (bulk < 0 || (type != gather_.ptr() && type != scatter_.ptr())) return -1;
    const bool scatters = type == scatter_.ptr();
    PyObject *b = given.get(kB, names().b);
    const Size operand = b == nullptr ? Size{} : size_of(b);
    const size_t tokens = registry_->tokens(use.index, communicator);
    if (!operand.known || tokens == 0 || operand.rows != tokens) return -1;
    if (scatters && bulk == 0 && !scatter_fits(use, given, tokens)) return -1;
    return 2 * bulk + static_cast<int>(scatters);
  }

  static bool scatter_fits(const Use &use, const Arguments &given, size_t tokens) {
    if (!use.splits) return false;
    PyObject *a = given.get(kA, names().a);
    const int transposed = truth(given.get(kTransA, names().trans_a), -1);
    if (a == nullptr || transposed < 0) return false;
    const Size weight = size_of(a);
    if (!weight.known || (transposed == 1 ? weight.rows : weight.columns) != use.hidden) return false;
    PyObject *extra = given.get(kExtra, names().extra);
    if (extra == nullptr || extra == Py_None) return true;
    const Size output = size_of(extra);
    return output.known && output.rows * output.columns * use.tp == tokens * use.hidden;
  }

  bool cleared_ = false;
  py::object owner_;
  const Registry *registry_;  // of owner_
  py::dict lent_, enqueuing_;
  py::object gather_, scatter_;
  std::unordered_map<PyObject *, Use> uses_;
};

// A function that lets a gate decide which of two functions a call takes; it gets the arguments as the interpreter has
// them. `method`: as an attribute of a class.
template <PyObject *(Gate::*path)(const Gate::Way &, const Arguments &), bool method>
py::object wrapped(const std::shared_ptr<Gate> &gate, py::object original, py::object slow) {
  struct Self {
    std::shared_ptr<Gate> gate;
    Gate::Way way;
  };
  PyCFunctionWithKeywords call = [](PyObject *capsule, PyObject *args, PyObject *kwargs) -> PyObject * {
    auto &self = self_of<Self>(capsule);
    return translated([&] { return (self.gate.get()->*path)(self.way, {args, kwargs}); });
  };
  static PyMethodDef definition = {
      path == &Gate::gemm ? "generic_gemm" : path == &Gate::copy ? "copy_into_buffer" : "get_buffer",
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_VARARGS | METH_KEYWORDS,
      "Transformer Engine's function, with ub_dynamic's guard in front."};
  py::object function = made_of(&definition, Self{gate, {std::move(original), std::move(slow)}});
  if (!method) return function;
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
}

}  // namespace ub_dynamic
