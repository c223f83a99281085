# SPDX-License-Identifier: Apache-2.0
"""BlockRoutes: which blocks of attention residuals cross which hop, decided once from the placement of layers.

A *block* (arXiv:2603.15031) is a hidden state that one stage *commits* and every later stage reads. Blocks are
numbered in the order in which they are committed. Stage ``s`` lives on rank ``s % pp``; with the cache a rank
keeps every block that it has seen, so a hop carries only what the next rank has not seen yet, and each block
crosses each edge of the ring at most once: the least that a relay of neighbours can do.

Nothing here depends on a microbatch, and nothing of it is on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import UBRankMismatchError, UBShapeError
from ..groups import Group

Blocks = tuple[int, ...]


@dataclass(frozen=True)
class BlockRoutes:
    """``counts[s]``: how many blocks stage ``s`` commits; ``pp`` ranks; with or without the cache of a rank."""

    pp: int
    counts: tuple[int, ...]
    cache: bool = True

    def __post_init__(self) -> None:
        if self.pp < 1 or not self.counts or len(self.counts) % self.pp:
            raise UBShapeError(
                f"{len(self.counts)} stages on pp = {self.pp} ranks: every rank needs the same number of chunks"
            )
        if min(self.counts) < 0:
            raise UBShapeError(f"counts = {list(self.counts)}: a stage cannot commit fewer than 0 blocks")

    # -- making ----------------------------------------------------------------------------------------------

    @classmethod
    def from_layers(cls, layers: Sequence[Sequence[int]], block: int, pp: int, *, cache: bool = True) -> BlockRoutes:
        """``layers[s]``: the layers of stage ``s``; a layer whose number is a multiple of ``block`` commits."""
        if block < 1:
            raise UBShapeError(f"block = {block}: a block has at least 1 layer")
        return cls(pp, tuple(sum(layer % block == 0 for layer in mine) for mine in layers), cache)

    @classmethod
    def exchange(cls, group: Group, commits: Sequence[int], *, cache: bool = True) -> BlockRoutes:
        """The one exchange, at build time: every rank of the pipeline tells what its chunks commit.

        ``commits[v]``: blocks of this rank's chunk ``v``. :class:`UBRankMismatchError` if the ranks disagree on
        the number of chunks or on ``cache``: they would build different routes and wait for each other.
        """
        told = group.allgather((tuple(commits), cache), "the exchange of block routes")
        for what, values in (("chunks", [len(c) for c, _ in told]), ("cache", [flag for _, flag in told])):
            if len(set(values)) > 1:
                named = ", ".join(f"rank {r}: {value}" for r, value in zip(group.members, values, strict=True))
                raise UBRankMismatchError(f"the ranks of a pipeline differ in {what}: {named}")
        size = group.size
        return cls(size, tuple(told[s % size][0][s // size] for s in range(size * len(commits))), cache)

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def stages(self) -> int:
        return len(self.counts)

    @property
    def vpp(self) -> int:
        return len(self.counts) // self.pp

    @cached_property
    def commits(self) -> tuple[Blocks, ...]:
        """Per stage: the blocks that it commits."""
        ends = [sum(self.counts[: s + 1]) for s in range(self.stages)]
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, self.counts, strict=True))

    @cached_property
    def held_at_entry(self) -> tuple[Blocks, ...]:
        """Per stage: the blocks that its rank keeps from its earlier chunks."""
        return tuple(self._seen_before(s) if self.cache else () for s in range(self.stages))

    @cached_property
    def send(self) -> tuple[Blocks, ...]:
        """Per stage: the blocks that go with the hidden state to the next stage; none after the last."""
        hops = []
        for s in range(self.stages - 1):
            held = set(self.held_at_entry[s + 1])
            hops.append(tuple(block for block in range(sum(self.counts[: s + 1])) if block not in held))
        return (*hops, ())

    def received(self, stage: int) -> Blocks:
        """The blocks that arrive with the hidden state of ``stage``."""
        return self.send[stage - 1] if stage else ()

    def keeps(self, stage: int) -> bool:
        """Whether the rank of ``stage`` has a later chunk that will want its blocks."""
        return self.cache and stage + self.pp < self.stages

    def deposits_expected(self, block: int, stage: int) -> int:
        """How many later chunks on the rank of ``stage`` take ``block`` from what it keeps; each leaves a gradient."""
        later = range(stage + self.pp, self.stages, self.pp)
        return sum(block in self.held_at_entry[s] for s in later)

    def stage_of(self, block: int) -> int:
        """The stage that commits ``block``."""
        return next(s for s, blocks in enumerate(self.commits) if block in blocks)

    # -- volume ----------------------------------------------------------------------------------------------

    def blocks_sent(self) -> int:
        """Block tensors a microbatch sends from rank to rank in its forward; as many gradients come back."""
        return sum(len(blocks) for blocks in self.send) if self.pp > 1 else 0

    def closed_form(self) -> int:
        """The same as a formula: ``sum_b (C-1-s_b)``, or ``sum_b min(pp-1, C-1-s_b)`` with the cache."""
        hops = [self.stages - 1 - s for s, count in enumerate(self.counts) for _ in range(count)]
        if self.pp == 1:
            return 0
        return sum(min(self.pp - 1, far) if self.cache else far for far in hops)

    def _seen_before(self, stage: int) -> Blocks:
        """All blocks committed up to the previous chunk of this rank: it has received or committed each of them."""
        return tuple(range(sum(self.counts[: stage - self.pp + 1]))) if stage >= self.pp else ()
