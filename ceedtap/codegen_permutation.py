"""Rows in an order that is found at a point, as pivoting does it: kept as the exchanges that it consists of.

As numbers, such an order would be compared with every position wherever rows are read in it. The exchanges are choices
between values instead, whose conditions are there already; so loops over points vectorise, and the numbers are needed
only where a function returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ceedtap.codegen import Builder, Scalar
from ceedtap.codegen_rules import Element, choose


@dataclass(frozen=True, eq=False)
class Exchange:
    """A row changes places with one of those after it, or with none.

    Attributes:
        row: its position.
        better: for each row after it, whether it is to come here rather than all rows before it.
        here: for each row after it, whether it is the one.
    """

    row: int
    better: tuple[Scalar, ...]
    here: tuple[Scalar, ...]

    def apply(self, builder: Builder, column: Sequence[Element]) -> list[Element]:
        first, *below = column[self.row :]
        top = first
        for better, x in zip(self.better, below, strict=True):
            top = choose(builder, better, x, top)
        below = [choose(builder, here, first, x) for here, x in zip(self.here, below, strict=True)]
        return [*column[: self.row], top, *below]


@dataclass(frozen=True, eq=False)
class Permutation:
    """The rows after some exchanges; `inverse` takes them back."""

    exchanges: tuple[Exchange, ...]
    inverse: bool = False

    def apply(self, builder: Builder, column: Sequence[Element]) -> list[Element]:
        rows = list(column)
        for exchange in reversed(self.exchanges) if self.inverse else self.exchanges:
            rows = exchange.apply(builder, rows)
        return rows


def remember(builder: Builder, numbers: Sequence[Scalar], permutation: Permutation) -> None:
    """Says which row each number stands for."""
    for i, number in enumerate(numbers):
        if not number.is_constant:
            builder.permutations[number.text] = permutation, i


def known(builder: Builder, number: Scalar) -> tuple[Permutation, int] | None:
    """The order of rows in which a number has this place, if it comes out of one."""
    found: tuple[Permutation, int] | None = None
    if not number.is_constant:
        found = builder.permutations.get(number.text)
    return found


def permutation_of(builder: Builder, numbers: Sequence[Scalar]) -> Permutation | None:
    """The order that all these numbers, in sequence, stand for."""
    places = [known(builder, number) for number in numbers]
    permutation = next((place[0] for place in places if place), None)
    for i, (number, place) in enumerate(zip(numbers, places, strict=True)):
        # A row that no exchange moves is known by its number.
        if not (place and place == (permutation, i)) and not (number.is_constant and number.value == i):
            return None
    return permutation
