// SPDX-License-Identifier: Apache-2.0
// Functions of Python without pybind11's dispatch, which takes longer than what they do.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace ub_dynamic {

namespace py = pybind11;

// The result of `work`, or null with the error set that it threw.
template <class Work>
PyObject *translated(Work &&work) {
  try {
    return work();
  } catch (py::error_already_set &error) {
    error.restore();
  } catch (const py::builtin_exception &error) {
    error.set_error();
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// A function that is given a `Self` of its own, which lives as long as it.
template <class Self>
py::object made_of(PyMethodDef *definition, Self self) {
  const py::capsule held(new Self(std::move(self)), [](void *pointer) { delete static_cast<Self *>(pointer); });
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(definition, held.ptr(), nullptr));
}

template <class Self>
Self &self_of(PyObject *capsule) {
  return *static_cast<Self *>(PyCapsule_GetPointer(capsule, nullptr));
}

// `method` of `owner`, which takes one object.
template <class Object, auto method>
py::object of_one_object(py::object owner) {
  struct Self {
    py::object owner;
    Object *object;
  };
  static PyMethodDef definition = {"of_one_object",
                                   [](PyObject *capsule, PyObject *argument) -> PyObject * {
                                     return translated([&] { return (*method)(*self_of<Self>(capsule).object, argument); });
                                   },
                                   METH_O, nullptr};
  auto *object = owner.cast<Object *>();
  return made_of(&definition, Self{std::move(owner), object});
}

template <class Object, auto method>
PyObject *with_integer(Object &object, PyObject *argument) {
  const Py_ssize_t value = PyNumber_AsSsize_t(argument, PyExc_OverflowError);
  if (value == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (value < 0) return PyErr_Format(PyExc_ValueError, "%zd is negative", value);
  return (*method)(object, value);
}

// The same for one integer that is not negative.
template <class Object, auto method>
py::object of_one_integer(py::object owner) {
  return of_one_object<Object, &with_integer<Object, method>>(std::move(owner));
}

}  // namespace ub_dynamic
