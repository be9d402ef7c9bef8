"""The fields of point functions: how an array of a JAX program is seen at one quadrature point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ceedtap.ceed_constants import EvalMode

if TYPE_CHECKING:
    from ceedtap.elements import LagrangeElements


@dataclass(frozen=True)
class Field:
    """Values of a field at one quadrature point.

    Attributes:
        space: the space that the field belongs to; None for data at quadrature points.
        eval_mode: libCEED's evaluation mode.
        shape: of the values at one point.
    """

    space: LagrangeElements | None
    eval_mode: EvalMode
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values at one point."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        where = f"{self.space!r}." if self.space is not None else "quadrature "
        return f"<Field {where}{self.eval_mode.name.lower()} {self.shape}>"


def quadrature(*shape: int) -> Field:
    """Data at the quadrature points, of this shape at each; nothing stands for one number.

    In a JAX program such a field is an array of shape (elements, points, *shape).

    >>> import ceedtap as ct
    >>> ct.quadrature(3, 3).size
    9
    """
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"the shape of quadrature data has positive integers, got {shape}")
    return Field(None, EvalMode.NONE, shape)
