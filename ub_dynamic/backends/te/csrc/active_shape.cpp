// SPDX-License-Identifier: Apache-2.0
// Reads and rewrites the shape of Transformer Engine's UserBuffers communicators. Host only: no CUDA call.
//
// A communicator looks at the shape of its buffer (`_ubuf`) and of the buffer's chunks (`_ubufs`, ring exchange
// only) each time an overlap is enqueued, and passes sizes and offsets on by value. Giving these two members a
// prefix of the registered memory is therefore all that a smaller number of tokens takes.
#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <vector>

#include "board.h"
#include "members.h"

namespace py = pybind11;

namespace ub_dynamic {
namespace {

const char *dtype_name(te::DType dtype) {
  switch (dtype) {
    case te::DType::kByte: return "uint8";
    case te::DType::kFloat32: return "float32";
    case te::DType::kFloat16: return "float16";
    case te::DType::kBFloat16: return "bfloat16";
    default: return "other";
  }
}

void reshape(te::TensorWrapper &tensor, char *data, te::DType dtype, size_t rows, size_t hidden) {
  NVTEShape shape;
  shape.ndim = 2;
  shape.data[0] = rows;
  shape.data[1] = hidden;
  tensor.set_rowwise_data(data, dtype, shape);
}

bool is_alive(PyObject *reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *object = nullptr;
  if (PyWeakref_GetRef(reference, &object) != 1) return false;
  Py_DECREF(object);
  return true;
#else
  return PyWeakref_GetObject(reference) != Py_None;
#endif
}

// One communicator with all that a change of shape needs.
struct Entry {
  py::weakref alive;
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
    if (!is_alive(alive.ptr())) throw std::runtime_error("a communicator was destroyed behind the registry's back");
  }
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
    Entry entry{py::weakref(communicator), &ubuf, nullptr, static_cast<char *>(ubuf.dptr()), ubuf.dtype(),
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
    if (!is_alive(entry.alive.ptr())) throw std::runtime_error("the communicator was destroyed");
    return entry.tokens();
  }

  void clear() { entries_.clear(); }
  size_t size() const { return entries_.size(); }

 private:
  std::vector<Entry> entries_;
};

// What a communicator says about itself; `chunks` holds (data pointer, rows, hidden) of each ring chunk.
py::dict inspect(py::object communicator) {
  Handle handle(communicator);
  auto &core = *handle.core;
  auto &ubuf = core.*Core::ubuf;
  const auto shape = ubuf.shape();
  py::list dims, chunks;
  for (size_t i = 0; i < shape.ndim; ++i) dims.append(shape.data[i]);
  py::dict facts;
  facts["shape"] = py::tuple(dims);
  facts["dtype"] = dtype_name(ubuf.dtype());
  facts["itemsize"] = ubuf.element_size();
  facts["data_ptr"] = reinterpret_cast<std::uintptr_t>(ubuf.dptr());
  facts["tp_size"] = core.*Core::tp_size;
  facts["tp_id"] = core.*Core::tp_id;
  facts["num_splits"] = core.*Core::num_splits;
  facts["num_sm"] = core.*Core::num_comm_sm;
  facts["math_sms"] = core.*Core::math_sms;
  facts["use_ce"] = core.*Core::use_ce != 0;
  facts["region"] = core.*Core::region;
  facts["atomic_gemm"] = core.*Core::atomic_gemm;
  facts["compute_streams"] = (core.*Core::stream_compute).size();
  facts["is_p2p"] = handle.p2p != nullptr;
  if (handle.p2p != nullptr) {
    auto &ring = *handle.p2p;
    for (auto &chunk : ring.*P2P::chunks) {
      const auto part = chunk.shape();
      const auto pointer = reinterpret_cast<std::uintptr_t>(chunk.dptr());
      chunks.append(py::make_tuple(pointer, part.ndim > 0 ? part.data[0] : 0, part.ndim > 1 ? part.data[1] : 0));
    }
    facts["reduce_scatter"] = ring.*P2P::is_reduce_scatter;
    facts["aggregate"] = ring.*P2P::aggregate;
  }
  facts["chunks"] = py::tuple(chunks);
  return facts;
}

// How an overlap is cut into splits and streaming multiprocessors: read at every enqueue, like the shape.
py::tuple settings(py::object communicator) {
  auto &core = *Handle(communicator).core;
  return py::make_tuple(core.*Core::num_splits, core.*Core::num_comm_sm, core.*Core::math_sms);
}

void set_settings(py::object communicator, int num_splits, int num_sm, int math_sms) {
  if (num_splits < 1 || num_sm < 1 || math_sms < 1) {
    throw py::value_error("num_splits, num_sm and math_sms must be at least 1");
  }
  auto &core = *Handle(communicator).core;
  core.*Core::num_splits = num_splits;
  core.*Core::num_comm_sm = num_sm;
  core.*Core::math_sms = math_sms;
}

// Keeps a communicator that outlived the others from ever being destroyed: its destructor would destroy whatever
// shared communicator exists by then. The reference that is taken is never returned. Its buffer, which is gone,
// becomes empty, so that every further use of the object is refused by Transformer Engine's own size checks.
void bury(py::object communicator) {
  Handle handle(communicator);
  auto &ubuf = handle.core->*Core::ubuf;
  const auto dtype = ubuf.dtype();
  reshape(ubuf, nullptr, dtype, 0, 0);
  if (handle.p2p != nullptr) {
    for (auto &chunk : handle.p2p->*P2P::chunks) reshape(chunk, nullptr, dtype, 0, 0);
  }
  communicator.inc_ref();
}

// An object without a buffer, to destroy the shared communicator where no real object does.
struct Closer : te::CommOverlapCore {
  using CreateEvent = int (*)(cudaEvent_t *, unsigned int);

  explicit Closer(CreateEvent create) {
    for (auto *event : {&_start_compute, &_stop_compute, &_start_comm, &_stop_comm}) {
      if (create(event, 0) != 0) *event = nullptr;
    }
    _comm_launch_event = nullptr;
  }
};

// Destroys the shared communicator if it still exists: every object was kept alive by somebody else, so that no
// destructor ran. CUDA is called through the symbol that Transformer Engine has loaded.
void destroy_shared() {
  if (!Core::shared_exists()) return;
  auto create = reinterpret_cast<Closer::CreateEvent>(dlsym(RTLD_DEFAULT, "cudaEventCreateWithFlags"));
  if (create == nullptr) throw std::runtime_error("the CUDA runtime of Transformer Engine was not found");
  Closer closer(create);
}

}  // namespace
}  // namespace ub_dynamic

PYBIND11_MODULE(active_shape, m) {
  using namespace ub_dynamic;
  m.doc() = "Shapes of Transformer Engine's UserBuffers communicators";
  py::class_<Registry>(m, "Registry", py::module_local())
      .def(py::init<>())
      .def("add", &Registry::add, py::arg("communicator"), py::arg("capacity"))
      .def("apply", &Registry::apply, py::arg("tokens"))
      .def("apply_one", &Registry::apply_one, py::arg("index"), py::arg("tokens"))
      .def("active", &Registry::active, py::arg("index"))
      .def("clear", &Registry::clear)
      .def("__len__", &Registry::size);
  py::class_<Board>(m, "Board", py::module_local())
      .def(py::init<py::buffer, py::buffer, std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), py::arg("words"),
           py::arg("compared"), py::arg("rank"), py::arg("size"), py::arg("slots"), py::arg("ahead"))
      .def("exchange", &Board::exchange, py::arg("tokens"));
  m.def("inspect", &inspect, py::arg("communicator"));
  m.def("settings", &settings, py::arg("communicator"));
  m.def("set_settings", &set_settings, py::arg("communicator"), py::arg("num_splits"), py::arg("num_sm"),
        py::arg("math_sms"));
  m.def("bury", &bury, py::arg("communicator"));
  m.def("shared_exists", &Core::shared_exists);
  m.def("destroy_shared", &destroy_shared);
}
