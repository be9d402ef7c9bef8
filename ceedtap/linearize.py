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

    def diagonal(self, output: str | None = None) -> Any:
        """The diagonal of the matrix, an array like the field.

        Args:
            output: name of the output whose matrix it is, which is like the field; None: the only one that is.

        Raises:
            ValueError: there is no such output, or the matrix is not square.
        """
        number = self._output(output)
        if not all(_alike(part.outputs[number], part.slot) for part in self._parts):
            raise ValueError(
                f"the matrix of {self._outputs[number].name} of {self._application.name} with respect to "
                f"{self._slot.name} is not square: only a field and an output of one space have a diagonal"
            )
        return functools.reduce(jnp.add, [part.diagonal(number) for part in self._parts])

    def assemble(self, output: str | None = None) -> sparse.BCOO:
        """The matrix of one output, of the flattened arrays: one row for each of its values, one column for each value
        of the field. Entries of neighbouring elements are not yet summed up: ``.sum_duplicates()`` does that.

        Args:
            output: name of the output; None: the only one, or, of several, the only one that is like the field.

        Raises:
            ValueError: there is no such output.

        The block of an operator with two fields and two outputs, by the names of both:

        >>> import ceedtap as ct, jax, jax.numpy as jnp
        >>> jax.config.update("jax_enable_x64", True)
        >>> mesh, ceed = ct.mesh.box(1, 1), ct.Ceed("/cpu/self")
        >>> V, Q = (ct.Space(ceed, mesh, degree=n, quadrature=3) for n in (2, 1))
        >>> @ct.operator(inputs=dict(u=V.value, p=Q.value, w=V.weight), outputs=dict(v=V.value, q=Q.value))
        ... def mixed(u, p, w):
        ...     return w * (u + p), w * u * p
        >>> mixed.linearize(jnp.ones(9), jnp.ones(4), wrt="p").assemble("v").shape
        (9, 4)
        """
        from jax.experimental import sparse  # slow to import

        number = self._output(output)
        data, indices = zip(*(part.entries(number) for part in self._parts), strict=True)
        shape = (self._outputs[number].size, self._slot.size)
        return sparse.BCOO((jnp.concatenate(data), jnp.asarray(np.concatenate(indices))), shape=shape)

    @property
    def _outputs(self) -> Sequence[Slot]:
        """The outputs, as the first part has them."""
        return self._parts[0].outputs

    def _output(self, name: str | None) -> int:
        """The number of an output."""
        slots = self._outputs
        numbers = [
            i
            for i, slot in enumerate(slots)
            if (_alike(slot, self._parts[0].slot) if name is None else slot.name == name)
        ]
        if name is None and len(slots) == 1:
            return 0
        if len(numbers) != 1:
            names = ", ".join(slot.name for slot in slots)
            got = "say which one: several or none of them are like the field" if name is None else f"got {name!r}"
            raise ValueError(f"{self._application.name} has the outputs {names}; {got}")
        return numbers[0]


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

    def diagonal(self, output: str | None = None) -> Any:
        """The diagonal, as of :meth:`Linearization.diagonal`."""
        return self._linearization.diagonal(output)

    def assemble(self, output: str | None = None) -> sparse.BCOO:
        """The transpose of the matrix that :meth:`Linearization.assemble` gives."""
        return self._linearization.assemble(output).T


class _Part:
    """One term of what is linearised."""

    def __init__(self, term: Term, number: int, inputs: Sequence[Any], stored: bool | None) -> None:
        self.term = term
        self._application = term.application
        self.slot = term.application.free[term.inputs.index(number)]
        self._inputs = [inputs[i] for i in term.inputs]
        n_in = _size(self.slot)
        n_out = sum(map(_size, self._application.function.outputs))
        self.stored = n_in * n_out <= MAX_STORED if stored is None else stored
        self._shape = n_out, n_in
        # Now, and not at the first use: that may be in a loop or a program which ends while this is still there.
        self._jacobian = self._new_jacobian(self._application.function) if self.stored else None

    @property
    def outputs(self) -> Sequence[Slot]:
        """The outputs, in the order of the sum."""
        slots = self._application.function.outputs
        return [slots[self.term.outputs.index(i)] for i in range(len(slots))]

    @property
    def jacobian(self) -> Any:
        """The point Jacobians."""
        return self._new_jacobian(self._application.function) if self._jacobian is None else self._jacobian

    def _new_jacobian(self, function: PointFunction) -> Any:
        shape = sum(map(_size, function.outputs)), self._shape[1]
        jacobian = _jacobian(function, self.slot, self._application.domain, shape)
        return apply_p.bind(*self._inputs, op=self._application.with_function(jacobian))[0]

    @property
    def product(self) -> PointApplication:
        """Of stored Jacobians and a direction."""
        function = _product(self._application.function, self.slot, self._application.domain, self._shape)
        return self._application.with_function(function)

    def _rows(self, number: int) -> Any:
        """The rows of the point Jacobians that belong to one output."""
        function = self._application.function
        own = self.term.outputs.index(number)
        slots = function.outputs
        if self.stored or len(slots) == 1:
            start = sum(map(_size, slots[:own]))
            return self.jacobian[:, :, start : start + _size(slots[own])]
        return self._new_jacobian(function.select(tuple(i == own for i in range(len(slots)))))

    def _blocks(self, number: int) -> tuple[_Basis, Any, _Basis]:
        """The nodal functions of an output and of the field, and between them the Jacobians by components."""
        left, right = _Basis(self.outputs[number]), _Basis(self.slot)
        d = self._rows(number)
        return left, d.reshape(*d.shape[:2], *left.values, *right.values), right

    def diagonal(self, number: int) -> Any:
        left, d, right = self._blocks(number)
        local = jnp.einsum("qpa,eqacbc,qpb->epc", left.table, d, right.table)
        return jnp.zeros(self.slot.size, local.dtype).at[right.dofs].add(local).reshape(self.slot.shape)

    def entries(self, number: int) -> tuple[Any, np.ndarray]:
        """Entries of the matrix, and their rows and columns."""
        left, d, right = self._blocks(number)
        local = jnp.einsum("qpa,eqacbk,qrb->epcrk", left.table, d, right.table)
        if left.signs is not None:
            local = local * left.signs[:, :, :, None, None]
        if right.signs is not None:
            local = local * right.signs[:, None, None, :, :]
        rows, columns = (basis.dofs.reshape(len(basis.dofs), -1) for basis in (left, right))
        rows, columns = np.broadcast_arrays(rows[:, :, None], columns[:, None, :])
        return local.reshape(-1), np.stack([rows.reshape(-1), columns.reshape(-1)], axis=1)


class _Basis:
    """The nodal functions of an array, seen from the elements. Data at quadrature points have one for each point.

    Attributes:
        table: values at the points: (points, nodes, values of one component).
        dofs: positions in the flattened array: (elements, nodes, components).
        signs: of the nodal functions, like `dofs`; None: all the same.
        values: how many there are at a point: those of one component, and components.
    """

    def __init__(self, slot: Slot) -> None:
        space = slot.fields[0].space
        if space is None:
            elements, points, *_ = slot.shape
            self.table = np.eye(points)[:, :, None]
            self.dofs = np.arange(slot.size).reshape(elements, points, -1)
            self.signs = None
        else:
            self.table = np.concatenate([space.table(field.eval_mode) for field in slot.fields], axis=2)
            self.dofs = space.element_dofs
            self.signs = space.orientation
        self.values = self.table.shape[2], self.dofs.shape[2]


def _alike(a: Slot, b: Slot) -> bool:
    """Whether arrays have the same nodal functions."""
    same = a.fields[0].space is b.fields[0].space
    return same and a.kind == b.kind and a.shape == b.shape


def _size(slot: Slot) -> int:
    """Values at a point."""
    return sum(f.size for f in slot.fields)


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
