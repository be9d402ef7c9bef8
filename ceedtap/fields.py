"""The fields of point functions: how an array of a JAX program is seen at one quadrature point."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from ceedtap.ceed_constants import EvalMode

if TYPE_CHECKING:
    from ceedtap.elements import ElementSpace


@dataclass(frozen=True)
class Field:
    """Values of a field at one quadrature point.

    Attributes:
        space: the space that the field belongs to; None for data at quadrature points.
        eval_mode: libCEED's evaluation mode.
        shape: of the values at one point.
        dtype: of integers and booleans, which libCEED keeps as numbers of its scalar type; None: of that type.
    """

    space: ElementSpace | None
    eval_mode: EvalMode
    shape: tuple[int, ...]
    dtype: np.dtype | None = None

    @property
    def size(self) -> int:
        """Values at one point."""
        return math.prod(self.shape)

    def __repr__(self) -> str:
        where = f"{self.space!r}." if self.space is not None else "quadrature "
        return f"<Field {where}{self.eval_mode.name.lower()} {self.shape}>"


def quadrature(*shape: int, dtype: npt.DTypeLike | None = None) -> Field:
    """Data at the quadrature points, of this shape at each; nothing stands for one number.

    In a JAX program such a field is an array of shape (elements, points, *shape).

    Args:
        shape: of the values at one point.
        dtype: an integer type or bool, such as of numbers of materials; None: libCEED's scalar type. Integers are exact
            up to 2**53 in magnitude (2**24 where libCEED computes in single precision). They have no derivatives.

    >>> import ceedtap as ct
    >>> ct.quadrature(3, 3).size
    9
    """
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"the shape of quadrature data has positive integers, got {shape}")
    if dtype is not None and np.dtype(dtype).kind not in "iub":
        raise TypeError(f"dtype= is an integer type or bool; real data have libCEED's type, got {np.dtype(dtype)}")
    return Field(None, EvalMode.NONE, shape, None if dtype is None else np.dtype(dtype))


def from_scalars(values: Any, dtype: np.dtype | None) -> Any:
    """What libCEED's scalars stand for: booleans, integers, or real numbers of another type; None: themselves."""
    if dtype is None:
        return values
    return values != 0 if dtype == np.bool_ else jax.lax.convert_element_type(values, dtype)
