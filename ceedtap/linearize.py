"""Derivatives of point operators with their point of linearisation kept: Newton's matrix, its diagonal, its entries."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.apply import apply_p
from ceedtap.ceed_constants import EvalMode
from ceedtap.fields import Field
from ceedtap.point_function import PointFunction, Slot

if TYPE_CHECKING:
    from jax.experimental import sparse

    from ceedtap.point_operator import _PointApplication

#: Point Jacobians of at most so many entries are stored: reading them costs less than computing them again.
MAX_STORED = 16


class Linearization:
    """The derivative of a :class:`ceedtap.PointOperator` with respect to one field; made by its `linearize`.

    It is a linear JAX function of that field, and can be made and used inside compiled programs.

    Attributes:
        stored: whether the point Jacobians are kept at the quadrature points.
    """

    def __init__(self, application: _PointApplication, wrt: str, inputs: Sequence[Any], stored: bool | None) -> None:
        slots = [slot for slot in application.free if slot.name == wrt]
        if not slots or slots[0].kind == "parameters":
            names = ", ".join(slot.name for slot in application.free if slot.kind != "parameters")
            raise ValueError(f"{application.name} can be linearised in {names}, got {wrt!r}")
        self._slot = slots[0]
        self._application = application
        self._inputs = list(inputs)
        n_in = sum(f.size for f in self._slot.fields)
        n_out = sum(f.size for slot in application.function.outputs for f in slot.fields)
        self.stored = n_in * n_out <= MAX_STORED if stored is None else stored
        self._shape = n_out, n_in

    @functools.cached_property
    def jacobian(self) -> Any:
        """The point Jacobians: an array (elements, points, values of the outputs, values of the field)."""
        function = _jacobian(self._application.function, self._slot, self._application.domain, self._shape)
        jacobian = self._application._apply(function)
        return apply_p.bind(*self._inputs, op=jacobian)[0]

    def __call__(self, du: Any) -> Any:
        """The derivative in the direction `du`, an array like the field; a tuple if there are several outputs."""
        if self.stored:
            function = _product(self._application.function, self._slot, self._application.domain, self._shape)
            outs = apply_p.bind(du, self.jacobian, op=self._application._apply(function))
        else:
            _, outs = jax.jvp(self._of_field, (self._inputs[self._number],), (du,))
        return outs[0] if len(outs) == 1 else tuple(outs)

    @property
    def _number(self) -> int:
        return self._application.free.index(self._slot)

    def _of_field(self, value: Any) -> list[Any]:
        inputs = [*self._inputs]
        inputs[self._number] = value
        return list(apply_p.bind(*inputs, op=self._application))

    # -- the matrix ----------------------------------------------------------------------------------------------

    def _square(self) -> tuple[Slot, Slot]:
        outputs = self._application.function.outputs
        if (
            len(outputs) != 1
            or self._slot.kind != "space"
            or outputs[0].fields[0].space is not self._slot.fields[0].space
        ):
            raise ValueError(
                f"the matrix of {self._application.name} with respect to {self._slot.name} is not square: it needs one "
                "output, of the same space as the field"
            )
        return outputs[0], self._slot

    def _blocks(self) -> Any:
        """The entries for the values of one element: (elements, points, nodes, components, nodes, components)."""
        out, slot = self._square()
        left, right = _matrix(out), _matrix(slot)  # (points, nodes, values of one component)
        components = math.prod(slot.shape[1:])
        d = self.jacobian.reshape(*self.jacobian.shape[:2], left.shape[2], components, right.shape[2], components)
        return left, d, right

    def diagonal(self) -> Any:
        """The diagonal of the matrix, an array like the field.

        Raises:
            ValueError: the matrix is not square.
        """
        left, d, right = self._blocks()
        local = jnp.einsum("qpa,eqacbc,qpb->epc", left, d, right)
        return self._sum(local)

    def _sum(self, local: Any) -> Any:
        space = self._slot.fields[0].space
        assert space is not None
        local = local.reshape(*local.shape[:2], *self._slot.shape[1:])
        return jnp.zeros(self._slot.shape, local.dtype).at[space.element_nodes].add(local)

    def assemble(self) -> sparse.BCOO:
        """The matrix, of the flattened fields. Entries of neighbouring elements are not yet summed up:
        ``.sum_duplicates()`` does that.

        Raises:
            ValueError: the matrix is not square.
        """
        from jax.experimental import sparse  # slow to import

        left, d, right = self._blocks()
        local = jnp.einsum("qpa,eqacbk,qrb->epcrk", left, d, right)
        space = self._slot.fields[0].space
        assert space is not None
        components = math.prod(self._slot.shape[1:])
        dofs = (space.element_nodes[:, :, None] * components + np.arange(components)).reshape(
            len(space.element_nodes), -1
        )
        rows, columns = np.broadcast_arrays(dofs[:, :, None], dofs[:, None, :])
        indices = np.stack([rows.reshape(-1), columns.reshape(-1)], axis=1)
        return sparse.BCOO((local.reshape(-1), jnp.asarray(indices)), shape=(self._slot.size, self._slot.size))


def _matrix(slot: Slot) -> np.ndarray:
    """Values at the points of the nodal functions: (points, nodes, values of one component)."""
    columns = []
    for field in slot.fields:
        assert field.space is not None
        if field.eval_mode is EvalMode.INTERP:
            columns.append(field.space.basis.get_interp()[:, :, None])
        else:
            columns.append(np.moveaxis(field.space.basis.get_grad(), 0, 2))
    return np.concatenate(columns, axis=2)


def _data(name: str, domain: Any, shape: tuple[int, int]) -> Slot:
    field = Field(None, EvalMode.NONE, shape)
    return Slot(name, "quadrature", (field,), (domain.num_elem, domain.num_points, *shape))


def _jacobian(function: PointFunction, slot: Slot, domain: Any, shape: tuple[int, int]) -> PointFunction:
    """From the inputs of a function to its Jacobian with respect to the values of a slot."""

    def make() -> PointFunction:
        evaluate = jax_compat.jaxpr_function(function.jaxpr)
        start = sum(len(s.fields) for s in function.inputs[: function.inputs.index(slot)])
        stop = start + len(slot.fields)

        def entries(*values: Any) -> list[Any]:
            def of_slot(flat: Any) -> Any:
                parts = _split(flat, slot.fields)
                return jnp.concatenate([jnp.ravel(v) for v in evaluate(*values[:start], *parts, *values[stop:])])

            return [jax.jacfwd(of_slot)(jnp.concatenate([jnp.ravel(v) for v in values[start:stop]]))]

        name = f"{function.name}_jacobian"
        return PointFunction(name, function.inputs, (_data("jacobian", domain, shape),), entries, function.dtype)

    return function.derived(("jacobian", slot.name), make)


def _product(function: PointFunction, slot: Slot, domain: Any, shape: tuple[int, int]) -> PointFunction:
    """The product of stored Jacobians with the values of a slot."""

    def make() -> PointFunction:
        fields = [f for out in function.outputs for f in out.fields]

        def product(*values: Any) -> list[Any]:
            *parts, jacobian = values
            return _split(jacobian @ jnp.concatenate([jnp.ravel(v) for v in parts]), fields)

        inputs = (slot, _data("jacobian", domain, shape))
        name, linear = f"{function.name}_linearized", frozenset({slot.name})
        return PointFunction(name, inputs, function.outputs, product, function.dtype, linear)

    return function.derived(("product", slot.name), make)


def _split(flat: Any, fields: Sequence[Field]) -> list[Any]:
    ends = np.cumsum([f.size for f in fields])
    return [flat[end - f.size : end].reshape(f.shape) for f, end in zip(fields, ends, strict=True)]
