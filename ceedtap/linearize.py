"""Derivatives of point operators with their point of linearisation kept: Newton's matrix, its diagonal, its entries."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.apply import Application, Mask, apply_p, check_array
from ceedtap.ceed_constants import EvalMode
from ceedtap.fields import Field
from ceedtap.point_function import PointFunction, Slot
from ceedtap.sum_application import SumApplication, Term, derivative_terms, make_sum, terms_of

if TYPE_CHECKING:
    from jax.experimental import sparse

    from ceedtap.point_application import PointApplication

#: Point Jacobians of at most so many entries are stored: reading them costs less than computing them again.
MAX_STORED = 16


class Linearization:
    """The derivative of a :class:`ceedtap.PointOperator` with respect to one field; made by its `linearize`.

    It is a linear JAX function of that field, and can be made and used inside compiled programs.

    Attributes:
        stored: whether the point Jacobians are kept at the quadrature points; of a sum: those of all parts.
    """

    def __init__(
        self, application: PointApplication | SumApplication, wrt: str, inputs: Sequence[Any], stored: bool | None
    ) -> None:
        terms = terms_of(application)
        numbers = {
            slot.name: (i, slot)
            for term in terms
            for slot, i in zip(term.application.free, term.inputs, strict=True)
            if slot.kind != "parameters" and slot.dtype is None
        }
        if wrt not in numbers:
            raise ValueError(f"{application.name} can be linearised in {', '.join(numbers)}, got {wrt!r}")
        self._number, self._slot = numbers[wrt]
        self._application = application
        self._inputs = list(inputs)
        self._parts = [_Part(term, self._number, inputs, stored) for term in terms if self._number in term.inputs]
        self.stored = all(part.stored for part in self._parts)

    @property
    def jacobian(self) -> Any:
        """The point Jacobians: an array (elements, points, values of the outputs, values of the field); of a sum: a
        tuple of them, one for each part that has the field."""
        jacobians = tuple(part.jacobian for part in self._parts)
        return jacobians[0] if len(jacobians) == 1 else jacobians

    # -- the linear map ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _action(self) -> tuple[Application, list[Any], Mask] | None:
        """The map as an application: of constants and, at last, the direction. The mask says which outputs it has."""
        known = [*self._inputs, *(part.jacobian for part in self._parts if part.stored)]

        def make() -> tuple[Application, Mask, Mask] | None:
            terms: list[Term] = []
            mask = tuple(i == self._number for i in range(len(self._inputs)))
            last = len(known)
            jacobians = itertools.count(len(self._inputs))
            for part in self._parts:
                if part.stored:
                    terms.append(Term(part.product, (next(jacobians), last), part.term.outputs))
                    continue
                for term in derivative_terms([part.term], mask):
                    inputs = tuple(last if i == len(mask) else i for i in term.inputs)
                    terms.append(replace(term, inputs=inputs))
            name = f"{self._application.name}_linearized"
            return make_sum(name, terms, last + 1, len(self._application.out_shapes)) if terms else None

        made = self._application.derived(("linearized", self._number, *(part.stored for part in self._parts)), make)
        if made is None:
            return None
        application, takes, has = made
        return application, [x for x, wanted in zip(known, takes[:-1], strict=True) if wanted], has

    def __call__(self, du: Any) -> Any:
        """The derivative in the direction `du`, an array like the field; a tuple if there are several outputs."""
        du = check_array(f"the direction of {self._slot.name}", du, self._slot.shape, self._application.dtype)
        results: Any = iter(())
        has: Mask = (False,) * len(self._application.out_shapes)
        if self._action is not None:
            application, constants, has = self._action
            results = iter(apply_p.bind(*constants, du, op=application))
        shapes = self._application.out_shapes
        outs = [next(results) if h else jnp.zeros(s, du.dtype) for h, s in zip(has, shapes, strict=True)]
        return outs[0] if len(outs) == 1 else tuple(outs)

    @property
    def T(self) -> TransposedLinearization:
        """The transpose: a linear JAX function of what a call of this one gives."""
        return TransposedLinearization(self)

    def _transposed(self, cotangents: Sequence[Any]) -> Any:
        """The product of the transpose."""
        if self._action is None:
            return jnp.zeros(self._slot.shape, self._application.dtype)
        application, constants, has = self._action
        transposed, takes = application.transpose((*(False for _ in constants), True))
        everything = [*constants, *(v for v, wanted in zip(cotangents, has, strict=True) if wanted)]
        return apply_p.bind(*(x for x, wanted in zip(everything, takes, strict=True) if wanted), op=transposed)[0]

    # -- the matrix ----------------------------------------------------------------------------------------------

    def diagonal(self) -> Any:
        """The diagonal of the matrix, an array like the field.

        Raises:
            ValueError: the matrix is not square.
        """
        return functools.reduce(jnp.add, [part.diagonal() for part in self._parts])

    def assemble(self) -> sparse.BCOO:
        """The matrix, of the flattened fields. Entries of neighbouring elements are not yet summed up:
        ``.sum_duplicates()`` does that.

        Raises:
            ValueError: the matrix is not square.
        """
        from jax.experimental import sparse  # slow to import

        data, indices = zip(*(part.entries() for part in self._parts), strict=True)
        shape = (self._slot.size, self._slot.size)
        return sparse.BCOO((jnp.concatenate(data), jnp.asarray(np.concatenate(indices))), shape=shape)


class TransposedLinearization:
    """The transpose of a :class:`Linearization`, its `T`: for adjoint equations."""

    def __init__(self, linearization: Linearization) -> None:
        self._linearization = linearization

    @property
    def T(self) -> Linearization:
        """What it is the transpose of."""
        return self._linearization

    def __call__(self, v: Any) -> Any:
        """The product with `v`, an array like the output of the operator, or a tuple if there are several; an array
        like the field."""
        application = self._linearization._application
        shapes = application.out_shapes
        values = v if isinstance(v, (tuple, list)) else (v,)
        if len(values) != len(shapes):
            raise ValueError(f"{application.name} has {len(shapes)} outputs, so the transpose takes as many: {v!r}")
        return self._linearization._transposed(
            [
                check_array("what the transpose takes", x, shape, application.dtype)
                for x, shape in zip(values, shapes, strict=True)
            ]
        )

    def diagonal(self) -> Any:
        """The diagonal, as of :meth:`Linearization.diagonal`."""
        return self._linearization.diagonal()

    def assemble(self) -> sparse.BCOO:
        """The matrix, as of :meth:`Linearization.assemble`."""
        return self._linearization.assemble().T


class _Part:
    """One term of what is linearised."""

    def __init__(self, term: Term, number: int, inputs: Sequence[Any], stored: bool | None) -> None:
        self.term = term
        self._application = term.application
        self._slot = term.application.free[term.inputs.index(number)]
        self._inputs = [inputs[i] for i in term.inputs]
        n_in = sum(f.size for f in self._slot.fields)
        n_out = sum(f.size for slot in self._application.function.outputs for f in slot.fields)
        self.stored = n_in * n_out <= MAX_STORED if stored is None else stored
        self._shape = n_out, n_in

    @functools.cached_property
    def jacobian(self) -> Any:
        """The point Jacobians."""
        function = _jacobian(self._application.function, self._slot, self._application.domain, self._shape)
        return apply_p.bind(*self._inputs, op=self._application.with_function(function))[0]

    @property
    def product(self) -> PointApplication:
        """Of stored Jacobians and a direction."""
        function = _product(self._application.function, self._slot, self._application.domain, self._shape)
        return self._application.with_function(function)

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
        """Left and right matrices of the nodal functions, and between them the Jacobians by components."""
        out, slot = self._square()
        left, right = _matrix(out), _matrix(slot)  # (points, nodes, values of one component)
        space = slot.fields[0].space
        assert space is not None
        components = space.element_dofs.shape[2]
        d = self.jacobian.reshape(*self.jacobian.shape[:2], left.shape[2], components, right.shape[2], components)
        return left, d, right

    def diagonal(self) -> Any:
        left, d, right = self._blocks()
        local = jnp.einsum("qpa,eqacbc,qpb->epc", left, d, right)
        space = self._slot.fields[0].space
        assert space is not None
        return jnp.zeros(self._slot.size, local.dtype).at[space.element_dofs].add(local).reshape(self._slot.shape)

    def entries(self) -> tuple[Any, np.ndarray]:
        """Entries of the matrix, and their rows and columns."""
        left, d, right = self._blocks()
        local = jnp.einsum("qpa,eqacbk,qrb->epcrk", left, d, right)
        space = self._slot.fields[0].space
        assert space is not None
        if (signs := space.orientation) is not None:
            local = local * signs[:, :, :, None, None] * signs[:, None, None, :, :]
        dofs = space.element_dofs.reshape(len(space.element_dofs), -1)
        rows, columns = np.broadcast_arrays(dofs[:, :, None], dofs[:, None, :])
        return local.reshape(-1), np.stack([rows.reshape(-1), columns.reshape(-1)], axis=1)


def _matrix(slot: Slot) -> np.ndarray:
    """Values at the points of the nodal functions: (points, nodes, values of one component)."""
    tables = [field.space.table(field.eval_mode) for field in slot.fields if field.space is not None]
    return np.concatenate(tables, axis=2)


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
            jacobian, *parts = values
            return _split(jacobian @ jnp.concatenate([jnp.ravel(v) for v in parts]), fields)

        inputs = (_data("jacobian", domain, shape), slot)
        name, linear = f"{function.name}_linearized", frozenset({slot.name})
        return PointFunction(name, inputs, function.outputs, product, function.dtype, linear)

    return function.derived(("product", slot.name), make)


def _split(flat: Any, fields: Sequence[Field]) -> list[Any]:
    ends = np.cumsum([f.size for f in fields])
    return [flat[end - f.size : end].reshape(f.shape) for f, end in zip(fields, ends, strict=True)]
