# SPDX-License-Identifier: Apache-2.0
"""Which active shapes all communicators of a process take, and what any other one is refused with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UBCapacityError, UBShapeError
from .rules import check_capacity, check_tokens, combine, token_rule
from .shapes import CommSpec, Shape, parse_shape


class ValidShapes:
    """The shapes ``(T, H)`` for the communicators ``specs`` at ``capacity``; ``rule`` says which T.

    Raises the :class:`UBShapeError` family where one cannot even take the capacity.
    """

    def __init__(self, specs: Mapping[str, CommSpec], capacity: Shape) -> None:
        check_capacity(specs.values())
        self._specs, self._capacity = specs, capacity
        self.rule = combine((token_rule(spec) for spec in specs.values()), capacity[0])

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
        if not self._specs:
            raise UBCapacityError(f"T = {tokens} tokens exceed the capacity of {self._capacity[0]} tokens")
        valid = self._neighbour(tokens)
        for spec in self._specs.values():
            try:
                check_tokens(spec, tokens)
            except UBShapeError as error:
                together = "" if valid in str(error) else f" (for all communicators together: {valid})"
                raise type(error)(f"{error}{together}") from None
        raise UBShapeError(f"T = {tokens} fits no communicator; {valid}")

    def _neighbour(self, tokens: int) -> str:
        try:
            return f"the next valid T is {self.rule.round_up(tokens)}"
        except UBCapacityError:
            return f"the largest valid T is {self.rule.maximum}"
