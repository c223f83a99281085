# SPDX-License-Identifier: Apache-2.0
"""What TE's layers read of their own ``ub_*`` flags, while a policy decides by T whether they overlap.

A layer stores its flags when it is built and reads them at every forward; its backward takes what the forward read.
Descriptors on the three classes answer these reads. The values stay in the instances, so that taking the descriptors
away leaves every layer as it was built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...errors import UBUnsupportedError
from .patches import Patches

Methods = Mapping[str, str]  # GEMM -> the method of its choice; the others are as configured
_NONE: Methods = MappingProxyType({})
_COLUMN_BACKWARD = ("ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
_LINEAR = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", *_COLUMN_BACKWARD)
_MLP = ("ub_overlap_ag", "ub_overlap_rs", *_COLUMN_BACKWARD)


class Flags:
    """``methods``: what is chosen now. Assigning it is all that a switch takes."""

    def __init__(self) -> None:
        self.methods: Methods = _NONE
        self._patches = Patches()

    def install(self) -> None:
        """Put the descriptors in, unless they are; :class:`UBUnsupportedError`, with nothing changed, for classes that
        are not known."""
        if self._patches:
            return
        import transformer_engine.pytorch as te

        try:
            for module, names in ((te.Linear, _LINEAR), (te.LayerNormLinear, _LINEAR), (te.LayerNormMLP, _MLP)):
                for name in names:
                    self._put(module, name)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> list[str]:
        """Take the descriptors out; returns those that somebody else has replaced since."""
        self.methods = _NONE
        return self._patches.undo()

    def _put(self, module: type, name: str) -> None:
        code = getattr(vars(module).get("__init__"), "__code__", None)
        if name not in getattr(code, "co_names", ()) or name in vars(module):
            raise UBUnsupportedError(f"te.{module.__name__} does not set {name} as it is built: this TE is not known")
        self._patches.add(module, name, _Flag(self, name, _RULES[name]))


class _Flag:
    """One flag of one class. ``rule`` gets the layer's attributes, the choices, and the value it was built with."""

    def __init__(self, flags: Flags, name: str, rule: Callable[[dict[str, Any], Methods, bool], bool]) -> None:
        self._flags, self._name, self._rule = flags, name, rule

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        attributes = module.__dict__
        try:
            built = attributes[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        methods = self._flags.methods
        return self._rule(attributes, methods, built) if methods else built

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self._name] = value

    def __delete__(self, module: Any) -> None:
        try:
            del module.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None


def _forward(attributes: dict[str, Any], methods: Methods, built: bool) -> bool:
    return built and methods.get(f"{attributes.get('ub_name')}_fprop") != "none"


def _row_backward(attributes: dict[str, Any], methods: Methods, built: bool) -> bool:
    return built and methods.get(f"{attributes.get('ub_name')}_dgrad") != "none"


def _mlp_gather(_: dict[str, Any], methods: Methods, built: bool) -> bool:
    # one flag for the all-gathers of both GEMMs
    return built and not (methods.get("fc1_fprop") == "none" and methods.get("fc2_dgrad") == "none")


def _mlp_scatter(_: dict[str, Any], methods: Methods, built: bool) -> bool:
    return built and methods.get("fc2_fprop") != "none"


def _reduces_dgrad(attributes: dict[str, Any], methods: Methods, built: bool) -> bool:
    method = _dgrad(attributes, methods)
    return built if method is None else method == "ring_exchange" and _overlaps_backward(attributes)


def _bulk(attributes: dict[str, Any], methods: Methods, built: bool) -> bool:
    method = _dgrad(attributes, methods)
    return built if method is None else method == "bulk" and (built or attributes["ub_overlap_rs_dgrad"])


def _dgrad(attributes: dict[str, Any], methods: Methods) -> str | None:
    """The method chosen for a column-parallel backward; None while the layer is being built."""
    if not all(name in attributes for name in _COLUMN_BACKWARD):
        return None
    return methods.get(f"{attributes.get('ub_name', 'fc1')}_dgrad")  # LayerNormMLP has no name, and contains fc1


def _overlaps_backward(attributes: dict[str, Any]) -> bool:
    return any(attributes[name] for name in _COLUMN_BACKWARD)


_RULES: Mapping[str, Callable[[dict[str, Any], Methods, bool], bool]] = {
    "ub_overlap_ag_fprop": _forward,
    "ub_overlap_rs_fprop": _forward,
    "ub_overlap_ag_dgrad": _row_backward,
    "ub_overlap_ag": _mlp_gather,
    "ub_overlap_rs": _mlp_scatter,
    "ub_overlap_rs_dgrad": _reduces_dgrad,
    "ub_bulk_dgrad": _bulk,
    "ub_bulk_wgrad": _bulk,
}
