# SPDX-License-Identifier: Apache-2.0
"""One way to overlap one GEMM with its collective, in the terms of TE's ``ub_cfgs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import UBShapeError, shown

OverlapMethod = Literal["none", "bulk", "pipeline", "ring_exchange"]
METHODS: tuple[OverlapMethod, ...] = ("none", "bulk", "pipeline", "ring_exchange")


@dataclass(frozen=True)
class OverlapConfig:
    """``method`` and the settings that TE reads each time an overlap is enqueued.

    ``"none"``: a plain collective before or after the GEMM. ``num_sm``: streaming multiprocessors of the
    communication kernels (bulk, pipeline). ``num_splits``: column blocks of a pipeline. ``aggregate``: a ring
    all-gather whose chunks travel in pairs. ``first_gemm``: TE's ``pipeline_rs_overlap_first_gemm``. None: as the
    communicator was configured. Raises :class:`UBShapeError` for a setting that its method does not have.
    """

    method: OverlapMethod
    num_sm: int | None = None
    num_splits: int | None = None
    aggregate: bool | None = None
    first_gemm: bool | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UBShapeError(f"unknown overlap method {shown(self.method)}; methods are {', '.join(METHODS)}")
        for name, value in self.settings().items():
            if name not in _SETTINGS[self.method]:
                known = ", ".join(_SETTINGS[self.method]) or "no settings"
                raise UBShapeError(f"method {self.method!r} has no setting {name}; it has {known}")
            where = f"{name} = {shown(value)} of method {self.method!r}"
            if name not in ("num_sm", "num_splits"):
                if type(value) is not bool:
                    raise UBShapeError(f"{where} must be bool: True or False")
            elif type(value) is not int:
                raise UBShapeError(f"{where} must be int, as in {name}=4")
            elif value < 1:
                raise UBShapeError(f"{where} must be at least 1; the next valid value is 1")

    def settings(self) -> dict[str, Any]:
        """The settings that are not left as configured."""
        every = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in every if name != "method" and value is not None}

    def to_json(self) -> dict[str, Any]:
        """``method`` and the settings, for a file."""
        return {"method": self.method, **self.settings()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OverlapConfig:
        """The inverse of :meth:`to_json`; :class:`UBShapeError` for keys that do not exist."""
        if unknown := set(data) - {field.name for field in fields(cls)}:
            known = ", ".join(field.name for field in fields(cls))
            raise UBShapeError(f"unknown overlap settings {shown(sorted(unknown))}; known are {known}")
        if "method" not in data:
            raise UBShapeError(f"an overlap configuration names its method: one of {', '.join(METHODS)}")
        return cls(**data)

    def __str__(self) -> str:
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.settings().items())])


_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "bulk": ("num_sm",),
    "pipeline": ("num_sm", "num_splits", "first_gemm"),
    "ring_exchange": ("aggregate",),
}
