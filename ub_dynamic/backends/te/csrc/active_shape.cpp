// SPDX-License-Identifier: Apache-2.0
// Reads and rewrites the shape of Transformer Engine's UserBuffers communicators. Host only: no CUDA call.
//
// A communicator looks at the shape of its buffer (`_ubuf`) and of the buffer's chunks (`_ubufs`, ring exchange
// only) each time an overlap is enqueued, and passes sizes and offsets on by value. Giving these two members a
// prefix of the registered memory is therefore all that a smaller number of tokens takes.
#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <string>

#include "board.h"
#include "direct.h"
#include "gate.h"
#include "ready.h"
#include "registry.h"

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
  } else if (Base::first_gemm() != nullptr) {
    facts["first_gemm"] = handle.base->*Base::first_gemm();
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

// Points a CommOverlap at the registered memory of another communicator: from then on both use one buffer, in turn.
// Its own, which may be small, stays registered and idle.
void adopt(py::object communicator, py::object owner, size_t tokens) {
  Handle handle(communicator), other(owner);
  if (handle.base == nullptr) throw py::type_error("a ring exchange owns its memory, it cannot use another's");
  auto &mine = handle.core->*Core::ubuf;
  auto &theirs = other.core->*Core::ubuf;
  const size_t hidden = mine.size(1), itemsize = mine.element_size();
  const bool same = theirs.size(1) == hidden && theirs.element_size() == itemsize &&
                    other.core->*Core::tp_size == handle.core->*Core::tp_size;
  if (!same || other.core->*Core::region < 0 || theirs.size(0) < tokens) {
    throw py::value_error("the memory of the owner does not hold " + std::to_string(tokens) + " rows like its own");
  }
  handle.core->*Core::region = other.core->*Core::region;
  reshape(mine, static_cast<char *>(theirs.dptr()), mine.dtype(), tokens, hidden);
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

// What every change of shape calls.
PyObject *apply(Registry &registry, Py_ssize_t tokens) {
  registry.apply(static_cast<size_t>(tokens));
  Py_RETURN_NONE;
}

// True: agreed. False: nothing was done. None: published, and to be looked at.
PyObject *as_object(Board::Answer answer) {
  if (answer == Board::Answer::kPublished) Py_RETURN_NONE;
  return PyBool_FromLong(answer == Board::Answer::kAgreed);
}

PyObject *exchange(Board &board, Py_ssize_t tokens) { return as_object(board.exchange(tokens)); }

PyObject *ask(Ready &ready, PyObject *tokens) {
  int beyond = 0;  // an integer that is too large here, which Python refuses by its value
  const long long value = PyLong_AsLongLongAndOverflow(tokens, &beyond);
  if (value == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return as_object(beyond == 0 ? ready.ask(value) : Board::Answer::kNotMade);
}

// A function that lets all communicators do as the plan says.
py::object plan(py::object owner, const std::vector<std::array<int, 6>> &settings, const std::vector<bool> &exchanged) {
  struct Self {
    py::object owner;
    Registry *registry;
    Plan plan;
  };
  static PyMethodDef definition = {"plan",
                                   [](PyObject *capsule, PyObject *) -> PyObject * {
                                     return translated([&]() -> PyObject * {
                                       auto &self = self_of<Self>(capsule);
                                       self.registry->switch_to(self.plan);
                                       Py_RETURN_NONE;
                                     });
                                   },
                                   METH_NOARGS, nullptr};
  auto *registry = owner.cast<Registry *>();
  Plan made = registry->plan(settings, exchanged);
  return made_of(&definition, Self{std::move(owner), registry, std::move(made)});
}

}  // namespace
}  // namespace ub_dynamic

PYBIND11_MODULE(active_shape, m) {
  using namespace ub_dynamic;
  m.doc() = "Shapes of Transformer Engine's UserBuffers communicators";
  py::class_<Registry>(m, "Registry", py::module_local())
      .def(py::init<>())
      .def("add", &Registry::add, py::arg("communicator"), py::arg("capacity"))
      .def_property_readonly("apply", &of_one_integer<Registry, &apply>)
      .def("apply_one", &Registry::apply_one, py::arg("index"), py::arg("tokens"))
      .def("active", &Registry::active, py::arg("index"))
      .def("pair", &Registry::pair, py::arg("first_key"), py::arg("second_key"), py::arg("first"), py::arg("second"))
      .def("use_table", &Registry::use_table, py::arg("namespace"), py::arg("name"))
      .def("plan", &plan, py::arg("settings"), py::arg("exchanged"))
      .def("clear", &Registry::clear)
      .def("__len__", &Registry::size);
  py::class_<Board>(m, "Board", py::module_local())
      .def(py::init<py::buffer, py::buffer, std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), py::arg("words"),
           py::arg("compared"), py::arg("rank"), py::arg("size"), py::arg("slots"), py::arg("ahead"))
      .def_property_readonly("exchange", &of_one_integer<Board, &exchange>);
  py::class_<Ready>(m, "Ready", py::module_local())
      .def(py::init<py::object, py::dict, py::dict, py::dict, py::object, std::int64_t, std::int64_t, std::int64_t>(),
           py::arg("board"), py::arg("lent"), py::arg("enqueuing"), py::arg("captures"), py::arg("capturing"),
           py::arg("multiple"), py::arg("minimum"), py::arg("maximum"))
      .def_property_readonly("ask", &of_one_object<Ready, &ask>);
  py::class_<Gate, std::shared_ptr<Gate>>(m, "Gate", py::module_local())
      .def(py::init<py::object, py::dict, py::dict, py::object, py::object>(), py::arg("registry"), py::arg("lent"),
           py::arg("enqueuing"), py::arg("gather"), py::arg("scatter"))
      .def("add", &Gate::add, py::arg("communicator"), py::arg("name"), py::arg("index"), py::arg("hidden"),
           py::arg("tp"), py::arg("splits"), py::arg("copies"), py::arg("lends"), py::arg("kinds"))
      .def("runs", &Gate::runs)
      .def("clear", &Gate::clear)
      .def("generic_gemm", &wrapped<&Gate::gemm, false>, py::arg("original"), py::arg("slow"))
      .def("copy_into_buffer", &wrapped<&Gate::copy, true>, py::arg("original"), py::arg("slow"))
      .def("get_buffer", &wrapped<&Gate::get_buffer, true>, py::arg("original"), py::arg("slow"));
  m.def("inspect", &inspect, py::arg("communicator"));
  m.def("settings", &settings, py::arg("communicator"));
  m.def("set_settings", &set_settings, py::arg("communicator"), py::arg("num_splits"), py::arg("num_sm"),
        py::arg("math_sms"));
  m.def("adopt", &adopt, py::arg("communicator"), py::arg("owner"), py::arg("tokens"));
  m.def("bury", &bury, py::arg("communicator"));
  m.def("shared_exists", &Core::shared_exists);
  m.def("destroy_shared", &destroy_shared);
}
