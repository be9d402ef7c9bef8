"""The elements and quadrature points that the fields of a point operator share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ceedtap.ceed import BASIS_NONE, ELEMRESTRICTION_NONE, LINE, EvalMode
from ceedtap.ceed_basis import writes_past_single_rows
from ceedtap.fields import Field
from ceedtap.point_function import Slot


class Domain:
    """The elements and quadrature points that the fields of an operator share.

    Raises:
        ValueError: the spaces have different meshes, elements, quadratures or Ceeds, or there is none.
    """

    def __init__(self, fields: Mapping[str, Sequence[Field]]) -> None:
        named = [(name, f.space) for name, values in fields.items() for f in values if f.space is not None]
        if not named:
            raise ValueError("an operator needs at least one field of a space: V.value, V.grad or V.weight")
        first_name, self.space = named[0]
        for name, space in named[1:]:
            if difference := self.space.difference(space):
                what, ours, theirs = difference
                has, hint = "has", ""
                if what == "their elements":
                    has, hint = "is", ". Take traces of all spaces by V.boundary(...), or add two operators"
                raise ValueError(
                    f"the fields of an operator share {what}: {first_name} {has} {ours}, {name} {has} {theirs}{hint}"
                )
        self.ceed = self.space.ceed
        self.num_elem: int = self.space.num_elements
        self.num_points: int = self.space.num_quadrature_points
        self.dtype = self.ceed.library.scalar_dtype

    def slot(self, name: str, fields: Sequence[Field]) -> Slot:
        """The slot of these fields, which belong to one array.

        Raises:
            ValueError: they do not.
        """
        first = fields[0]
        if any(f.space is not first.space for f in fields) or (len(fields) > 1 and first.space is None):
            raise ValueError(
                f"the fields of {name} are evaluations of one array, so they belong to one space: {fields}"
            )
        if first.space is None:
            return Slot(name, "quadrature", tuple(fields), (self.num_elem, self.num_points, *first.shape))
        if first.eval_mode is EvalMode.WEIGHT:
            return Slot(name, "weight", tuple(fields), ())
        return Slot(name, "space", tuple(fields), first.space.shape)

    # -- libCEED -------------------------------------------------------------------------------------------------

    def place(self, slot: Slot, field: Field) -> tuple[Any, Any]:
        """Restriction and basis of a field."""
        if slot.kind == "space":
            assert field.space is not None
            return field.space.restriction, field.space.basis
        if slot.kind == "weight":
            return ELEMRESTRICTION_NONE, self.space.basis
        n = field.size
        if slot.kind == "quadrature":
            points = self.num_points
            size = self.num_elem * points * n
            return self.ceed.StridedElemRestriction(self.num_elem, points, n, size, [n, 1, points * n]), BASIS_NONE
        # What belongs to the operator as a whole: one node for all elements, whose basis function is 1 everywhere. So
        # libCEED sums up the contributions of the points while it has them at hand. Its kernel for avx/serial writes
        # past the end of arrays when an element has a single node, so there it has a second one, whose function is 0.
        nodes = 2 if writes_past_single_rows(self.ceed) else 1
        interp = np.tile(np.eye(1, nodes, dtype=self.dtype), (self.num_points, 1))
        zero = np.zeros_like(interp)
        basis = self.ceed.BasisH1(LINE, n, nodes, self.num_points, interp, zero, zero[:, 0], zero[:, 0])
        offsets = np.zeros(self.num_elem * nodes, np.int32)
        return self.ceed.ElemRestriction(self.num_elem, nodes, n, 1, n, offsets), basis

    # -- plain JAX -----------------------------------------------------------------------------------------------

    def at_points(self, field: Field, x: Any) -> Any:
        """Values of a field at all points: (elements, points, *field.shape)."""
        space = field.space
        if space is None:
            return x
        if field.eval_mode is EvalMode.WEIGHT:
            return jnp.broadcast_to(space.weights, (self.num_elem, self.num_points))
        local = jnp.ravel(x)[space.element_dofs]
        local = local if space.orientation is None else local * space.orientation
        values = jnp.einsum("qpv,epc->eqvc", space.table(field.eval_mode), local)
        return values.reshape(self.num_elem, self.num_points, *field.shape)

    def from_points(self, field: Field, values: Any) -> Any:
        """The transpose of :meth:`at_points`: the contributions to an array."""
        space = field.space
        if space is None:
            return values
        table = space.table(field.eval_mode)
        values = values.reshape(self.num_elem, self.num_points, table.shape[2], -1)
        local = jnp.einsum("qpv,eqvc->epc", table, values)
        local = local if space.orientation is None else local * space.orientation
        return jnp.zeros(math.prod(space.shape), values.dtype).at[space.element_dofs].add(local).reshape(space.shape)
