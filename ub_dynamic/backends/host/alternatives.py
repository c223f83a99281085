# SPDX-License-Identifier: Apache-2.0
"""What a policy switches between: the communicators of one GEMM in one storage, and plans of which one stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

from ...errors import UBUnsupportedError
from ...overlap import OverlapConfig
from ...shapes import Collective, CommSpec, Method
from ..names import overlap_specs, registered_specs
from ..protocol import Alternatives
from .bulk import BulkAllGather, BulkReduceScatter
from .communicator import Communicator, Storage
from .engine import Engine
from .pipeline import PipelineReduceScatter
from .ring import RingAllGather, RingReduceScatter

CLASSES: Mapping[tuple[Method, Collective], type[Communicator]] = {
    ("bulk", "ag"): BulkAllGather,
    ("bulk", "rs"): BulkReduceScatter,
    ("pipeline", "rs"): PipelineReduceScatter,
    ("ring_exchange", "ag"): RingAllGather,
    ("ring_exchange", "rs"): RingReduceScatter,
}
NOTES: Mapping[str, str] = {
    "num_sm": "accepted without effect: transfers on the host take a thread, not streaming multiprocessors",
    "first_gemm": "accepted without effect: there are no streams that a pipeline's first GEMM could wait on",
}
NOTES_OF_ONE_RANK: Mapping[str, str] = {
    "method": "accepted without effect: a TP group of one rank has nothing to communicate",
}


@dataclass(frozen=True)
class Plan:
    """What stands under each of TE's names (None: a plain collective), and the settings of what stands there."""

    standing: Mapping[str, Communicator | None]
    settings: tuple[tuple[Communicator, CommSpec], ...]


class HostAlternatives:
    """``configured``: the communicators without a policy, by name. ``alternatives``: what each GEMM may use besides.

    Raises what :func:`~ub_dynamic.backends.names.registered_specs` refuses.
    """

    def __init__(self, configured: Mapping[str, CommSpec], alternatives: Alternatives) -> None:
        self._configured = configured
        self._alternatives = alternatives
        self.registered = {spec.name: spec for spec in registered_specs(configured.values(), alternatives)}
        self._used: dict[str, set[CommSpec]] = {name: {spec} for name, spec in configured.items()}  # by name: settings
        for gemm, configs in alternatives.items():
            for config in configs:
                for spec in overlap_specs(configured, gemm, config).values():
                    if spec is not None:
                        self._used.setdefault(spec.name, set()).add(spec)

    def make(self, engine: Engine) -> dict[str, Communicator]:
        """All communicators, those of one GEMM in one storage that is large enough for each."""
        made: dict[str, Communicator] = {}
        storages: dict[str, Storage] = {}
        for name, spec in self.registered.items():
            if spec.method == "external":
                continue
            gemm = _gemm(name)
            if gemm not in storages:
                storages[gemm] = self._storage(gemm, spec)
            made[name] = CLASSES[spec.method, spec.collective](spec, engine, storages[gemm])
        return made

    def _storage(self, gemm: str, spec: CommSpec) -> Storage:
        every = [used for name, specs in self._used.items() if _gemm(name) == gemm for used in specs]
        kinds = [(CLASSES[used.method, used.collective], used) for used in every if used.method != "external"]
        return Storage(reduce(or_, (kind.needs(used) for kind, used in kinds)), spec.dtype)

    def plan(self, choices: Mapping[str, OverlapConfig], made: Mapping[str, Communicator]) -> Plan:
        """Raises :class:`UBUnsupportedError` for a choice that was not among the alternatives."""
        if not made:
            return Plan({}, ())  # one rank: nothing to communicate
        standing: dict[str, CommSpec | None] = {n: spec for n, spec in self._configured.items() if n in made}
        for gemm, config in choices.items():
            specs = overlap_specs(self._configured, gemm, config)
            if config not in self._alternatives.get(gemm, ()):
                named = "; ".join(map(str, self._alternatives.get(gemm, ())))
                raise UBUnsupportedError(
                    f"{gemm}: {config} is not what the policy of initialize_ub named for it, which is "
                    f"{named or 'nothing: this GEMM stays as configured'}"
                )
            standing.update(specs)
        stand = [spec for spec in standing.values() if spec is not None]
        return Plan(
            {name: None if spec is None else made[spec.name] for name, spec in standing.items()},
            tuple(
                (made[spec.name], spec) for spec in stand if self._used[spec.name] | {made[spec.name].spec} != {spec}
            ),
        )


def _gemm(name: str) -> str:
    """``"fc2_fprop (pipeline)"`` -> ``"fc2_fprop"``."""
    return name.partition(" (")[0]
