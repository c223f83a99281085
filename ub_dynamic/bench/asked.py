# SPDX-License-Identifier: Apache-2.0
"""What a measurement is asked for, checked by the process that starts the ranks, before it starts any.

Everything that the ranks would refuse because of the options alone is refused here, by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..backends.names import registered_specs, resolve_specs
from ..errors import UBCapacityError, UBShapeError, UBUnsupportedError
from ..policy import Policy
from ..rules import check_tokens, combine, token_rule
from ..shapes import CommSpec
from . import graphs, set_shape
from .lengths import workloads_of
from .op import table_policy
from .operations import check_sizes
from .start import mode_of
from .tp_step import check_arms, check_te_layer, not_comparable
from .worlds import BackendName

_LONGEST_S = 86400.0 * 30


def check_asked(name: str, options: Mapping[str, Any], backend: BackendName, ranks: int) -> None:
    """Raise for what ``bench name`` (``"op"``, ``"tp-step"``, ..., or ``"tune"``) could not do with ``options``.

    ``options``: those of the job. The :class:`UBShapeError` family with value, rule and next valid value for sizes, T
    and lengths; :class:`UBUnsupportedError` for a table or a machine that does not fit.
    """
    if "seconds" in options and not 0 < options["seconds"] <= _LONGEST_S:
        raise UBShapeError(f"seconds = {options['seconds']}: a number above 0, at most {_LONGEST_S:g}, as in 60")
    dtype = _dtype(backend)
    capacity, hidden = _registered(name, options, backend)
    cfgs = set_shape.HOST_CFGS if name == "set-shape" and backend == "host" else None
    try:
        specs = resolve_specs((capacity, hidden), ranks, dtype, cfgs)
        _check_tokens(name, options, specs, ranks)
    except UBShapeError as error:
        if name == "graphs" and (valid := _graphs_capacity(capacity, ranks)) != capacity:
            raise type(error)(
                f"capacity = {capacity}, of which 1/2 and 1/8 are measured too: {error}; the next valid capacity is "
                f"{valid}"
            ) from None
        raise
    if "ffn" in options:
        check_sizes(hidden, options["ffn"], ranks)
    if name in ("tp-step", "lengths") and backend == "te":
        check_te_layer(options["layer"], hidden, options["ffn"], ranks)
    if name == "lengths":
        _check_workloads(options, specs, ranks)
    mode = mode_of(backend, ranks)
    policy = table_policy(options, tp=ranks, dtype=dtype, mode=mode)
    if policy is not None and name != "op":  # which leaves out what cannot be had
        _check_followed(options["policy"], policy, specs, backend)
    if "arms" in options:
        check_arms(name, [arm for arm in options["arms"] if not_comparable(mode, arm, policy) is None])


def rounded(options: Mapping[str, Any], backend: BackendName, ranks: int) -> list[int]:
    """``tokens`` of ``op`` or ``tune`` as the ranks round them, by multiple and minimum of what is configured."""
    return _rounded(options["tokens"], resolve_specs(_registered("tune", options, backend), ranks, _dtype(backend)))


def _rounded(tokens: Sequence[int], specs: Sequence[CommSpec]) -> list[int]:
    """:class:`UBCapacityError` where there is no such T."""
    rule = combine((token_rule(spec) for spec in _following(specs)), specs[0].capacity[0])
    return sorted({rule.round_up(count) for count in tokens})


def _following(specs: Sequence[CommSpec]) -> list[CommSpec]:
    """Those that follow the active shape."""
    return [spec for spec in specs if spec.method != "external"]


def _dtype(backend: BackendName) -> torch.dtype:
    return torch.bfloat16 if backend == "te" else torch.float32


def _registered(name: str, options: Mapping[str, Any], backend: BackendName) -> tuple[int, int]:
    """The shape ``[T_cap, H]`` that the ranks register."""
    if name == "set-shape":
        te = backend == "te"
        return (set_shape.TE_CAPACITY, set_shape.TE_HIDDEN) if te else (set_shape.HOST_CAPACITY, set_shape.HOST_HIDDEN)
    hidden = options["hidden"]
    return (max(options["tokens"]) if name in ("op", "tune") else options["capacity"]), hidden


def _check_tokens(name: str, options: Mapping[str, Any], specs: Sequence[CommSpec], ranks: int) -> None:
    following = _following(specs)
    if name in ("op", "tune"):
        _rounded(options["tokens"], specs)  # as the ranks do
    elif name == "tp-step":
        for tokens in options["tokens"]:
            if tokens > options["capacity"]:
                raise UBCapacityError(
                    f"tokens: T = {tokens} is above the capacity of {options['capacity']}; the next valid value is "
                    f"{options['capacity']}"
                )
        _check_each(options["tokens"], following)
    elif name == "graphs":
        _check_each(graphs.lengths_of(options["capacity"], ranks), following)


def _check_workloads(options: Mapping[str, Any], specs: Sequence[CommSpec], ranks: int) -> None:
    following = _following(specs)
    for workload, tokens in workloads_of(options, ranks).items():
        try:
            _check_each(sorted(set(tokens)), following)
        except UBShapeError as error:
            raise type(error)(f"the smallest microbatch of {workload}: {error}") from None


def _graphs_capacity(capacity: int, ranks: int) -> int:
    """The next one whose half and eighth are valid T as well."""
    return max(-(-capacity // (8 * ranks)) * 8 * ranks, 64 * ranks)


def _check_each(tokens: Iterable[int], specs: Sequence[CommSpec]) -> None:
    for count in tokens:
        for spec in specs:
            check_tokens(spec, count)


def _check_followed(path: str, policy: Policy, specs: Sequence[CommSpec], backend: BackendName) -> None:
    try:
        registered_specs(specs, policy.configurations())
        if backend == "te":
            from ..backends.te.alternatives import arrange

            arrange(policy.configurations(), None, specs[0].capacity, specs[0].tp, specs[0].dtype)
    except (UBShapeError, UBUnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from error
