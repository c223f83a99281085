# SPDX-License-Identifier: Apache-2.0
"""Which active shapes all communicators of a process take, and what any other one is refused with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UBCapacityError, UBShapeError, UBUnsupportedError
from .rules import TokenRule, check_capacity, check_even, check_tokens, combine, even_rule, token_rule
from .shapes import CommSpec, Shape, parse_shape


class ValidShapes:
    """The shapes ``(T, H)`` for the communicators ``specs`` of ``tp`` ranks at ``capacity``; ``rule`` says which T.

    ``capacity_only``: why no other T than the capacity is possible, or None. Raises the :class:`UBShapeError` family
    where a communicator cannot even take the capacity.
    """

    def __init__(self, specs: Mapping[str, CommSpec], capacity: Shape, tp: int, capacity_only: str | None) -> None:
        check_capacity(specs.values())
        self._specs, self._capacity, self._tp, self._capacity_only = specs, capacity, tp, capacity_only
        if capacity_only is not None:
            self.rule = TokenRule(capacity[0], capacity[0], capacity[0])
        else:
            self.rule = combine((even_rule(capacity[0], tp), *map(token_rule, specs.values())), capacity[0])

    def parse(self, shape: Any) -> Shape:
        """``shape`` as ``(T, H)``, T not checked yet; :class:`UBShapeError` for what is none, or has another H."""
        tokens, hidden = parse_shape(shape)
        if hidden != self._capacity[1]:
            raise UBShapeError(f"shape [{tokens}, {hidden}]: hidden size is fixed at init: H = {self._capacity[1]}")
        return tokens, hidden

    def check(self, tokens: int) -> None:
        """Raise the error that fits if some communicator cannot take T: that of the first one."""
        if self.rule.accepts(tokens):
            return
        parse_shape((tokens, self._capacity[1]))
        valid = self._neighbour(tokens)
        if self._capacity_only is not None and tokens < self._capacity[0]:
            raise UBUnsupportedError(
                f"no communicator can take T = {tokens}, all stay at capacity {list(self._capacity)}: "
                f"{self._capacity_only}; {valid}"
            )
        for spec in self._specs.values():
            try:
                check_tokens(spec, tokens)
            except UBShapeError as error:
                together = "" if valid in str(error) else f" (for all communicators together: {valid})"
                raise type(error)(f"{error}{together}") from None
        # No communicator here has rules of its own.
        check_even(f"shape [{tokens}, {self._capacity[1]}]", tokens, self._capacity[0], self._tp)

    def _neighbour(self, tokens: int) -> str:
        try:
            return f"the next valid T is {self.rule.round_up(tokens)}"
        except UBCapacityError:
            return f"the largest valid T is {self.rule.maximum}"
