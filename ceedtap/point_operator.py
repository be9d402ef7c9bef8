"""Operators whose physics is a JAX function of one quadrature point: `operator`."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ceedtap import jax_compat, point_taps
from ceedtap.apply import Application, Connection, Mask, Switch, apply, check_array
from ceedtap.ceed import (
    BASIS_NONE,
    ELEMRESTRICTION_NONE,
    LINE,
    USE_POINTER,
    VECTOR_ACTIVE,
    VECTOR_NONE,
    Ceed,
    EvalMode,
    QFunction,
    QFunctionContext,
    Vector,
)
from ceedtap.ceed import Operator as CeedOperator
from ceedtap.ceed_qfunction import MAX_FIELDS
from ceedtap.fields import Field, as_integers
from ceedtap.linearize import Linearization
from ceedtap.point_function import PointFunction, Slot

if TYPE_CHECKING:
    from ceedtap.operator_sum import OperatorSum

Fields = Field | Sequence[Field]


# -- the domain --------------------------------------------------------------------------------------------------------


class _Domain:
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
        nodes = 2 if self.ceed.get_resource() == "/cpu/self/avx/serial" else 1
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


@dataclass
class _Ends:
    """What the fields of a libCEED operator are connected to.

    Attributes:
        inputs: by name of the slot, a vector or the part of `memory` that holds parameters.
        outputs: the vectors of the results.
        memory: of the QFunction's context.
    """

    inputs: dict[str, Vector | np.ndarray]
    outputs: list[Vector]
    memory: np.ndarray


# -- application -------------------------------------------------------------------------------------------------------


class _PointApplication(Application):
    """A point function on the elements of a mesh. Slots for weights are no inputs."""

    def __init__(self, function: PointFunction, domain: _Domain, bound: Mapping[str, np.ndarray]) -> None:
        self.function = function
        self.domain = domain
        self.bound = {slot.name: bound[slot.name] for slot in function.inputs if slot.name in bound}
        self.free = [slot for slot in function.inputs if slot.kind != "weight" and slot.name not in self.bound]
        self.name = function.name
        self.in_shapes = tuple(slot.shape for slot in self.free)
        # When nobody listens to any of the taps they are not computed; one more output says whether they were.
        self.optional = bool(function.taps) and all(tap.optional for tap in function.taps)
        shapes = [slot.shape for slot in function.results]
        self.out_shapes = (*shapes, ()) if self.optional else tuple(shapes)
        self.num_tapped = len(self.out_shapes) - len(function.outputs)
        self.linear = frozenset(i for i, slot in enumerate(self.free) if slot.name in function.linear)
        self.dtype = function.dtype
        self._derived: dict[Any, Any] = {}

    # -- libCEED -------------------------------------------------------------------------------------------------

    def qfunction(self, memory: np.ndarray) -> QFunction:
        """The compiled QFunction, with this memory as its context."""
        function, ceed = self.function, self.domain.ceed
        source, name = function.source
        fields = [slot for slot in function.inputs if slot.kind != "parameters"]
        inputs, outputs = function.eval_modes(fields), function.eval_modes(function.results)
        if len(fields) == len(function.inputs):
            return QFunction.from_source(ceed, source, name, inputs=inputs, outputs=outputs)
        context = QFunctionContext(ceed)
        context.set_data(memory, cmode=USE_POINTER)
        qf = QFunction.from_source(ceed, source, name, inputs=inputs, outputs=outputs, context=context)
        qf.set_context_writable(False)
        return qf

    def new_ends(self) -> _Ends:
        """New vectors for all inputs and outputs, and memory for the parameters."""
        function, ceed = self.function, self.domain.ceed
        parameters = [slot for slot in function.inputs if slot.kind == "parameters"]
        memory = np.zeros(max(sum(slot.size for slot in parameters), 1), self.dtype)
        inputs: dict[str, Vector | np.ndarray] = {
            slot.name: ceed.Vector(slot.size) for slot in function.inputs if slot.kind not in ("parameters", "weight")
        }
        offset = 0
        for slot in parameters:
            inputs[slot.name] = memory[offset : offset + slot.size]
            offset += slot.size
        for name, value in self.bound.items():
            end = inputs[name]
            if isinstance(end, Vector):
                end.set_array(np.ascontiguousarray(value).reshape(-1))
            else:
                end[:] = value.reshape(-1)
        return _Ends(inputs, [ceed.Vector(slot.size) for slot in function.results], memory)

    def build(self, active: str | None = None, ends: _Ends | None = None) -> tuple[CeedOperator, _Ends]:
        """A libCEED operator whose fields have vectors of their own, or these, except for the active input and the
        outputs that go with it."""
        function = self.function
        if function.num_fields > MAX_FIELDS:
            raise ValueError(
                f"{function.name} has {function.num_fields} fields; libCEED has room for {MAX_FIELDS} of an operator, "
                "inputs and outputs together, each part of a tuple and each tapped array counted"
            )
        ends = ends or self.new_ends()
        op = self.domain.ceed.Operator(self.qfunction(ends.memory))
        op.name = function.name
        for slot in function.inputs:
            if slot.kind != "parameters":
                vector: Any = VECTOR_ACTIVE if slot.name == active else ends.inputs.get(slot.name, VECTOR_NONE)
                self._set_fields(op, slot, vector)
        for slot, output in zip(function.results, ends.outputs, strict=False):
            self._set_fields(op, slot, VECTOR_ACTIVE if active is not None else output)
        op.check()
        return op, ends

    def _set_fields(self, op: CeedOperator, slot: Slot, vector: Any) -> None:
        for name, field in zip(slot.field_names(), slot.fields, strict=True):
            op.set_field(name, *self.domain.place(slot, field), vector)
            if slot in self.function.results and isinstance(vector, Vector):
                # Outputs that contribute to one vector: libCEED adds them up. `set_field` refuses a vector that another
                # output has, so the next one gets a handle of its own on the same vector.
                vector = copy.copy(vector)

    def connect(self) -> Connection:
        op, ends = self.build()
        inputs = [ends.inputs[slot.name] for slot in self.free]
        if not self.optional:
            return Connection(op, inputs, ends.outputs, (None, None))
        idle, _ = self.silent().build(ends=ends)
        switches = [Switch(tap.params["binding"].consumer) for tap in self.function.taps]
        return Connection(op, inputs, [*ends.outputs, None], (None, None), idle, switches)

    # -- plain JAX -----------------------------------------------------------------------------------------------

    def evaluate(self, *inputs: Any) -> list[Any]:
        given = {slot.name: x for slot, x in zip(self.free, inputs, strict=True)} | dict(self.bound)
        values, axes = [], []
        for slot in self.function.inputs:
            for field in slot.fields:
                x = given.get(slot.name)
                values.append(x if slot.kind == "parameters" else self.domain.at_points(field, x))
                axes.append(None if slot.kind == "parameters" else 0)
        per_point = jax.vmap(jax.vmap(jax_compat.jaxpr_function(self.function.jaxpr), axes), axes)
        results = iter(per_point(*values))
        out = []
        for slot in self.function.results:
            parts = [(field, next(results)) for field in slot.fields]
            if slot.kind == "parameters":
                out.append(parts[0][1].sum((0, 1)))
            else:
                out.append(functools.reduce(jnp.add, [self.domain.from_points(f, v) for f, v in parts]))
        return [*out, jnp.ones((), self.dtype)] if self.optional else out

    def emit(self, tapped: Sequence[Any], inputs: Sequence[Any]) -> None:
        point_taps.emit(
            self.function.taps, tapped, {slot.name: x for slot, x in zip(self.free, inputs, strict=True)},
            conditions=[tapped[-1]] if self.optional else [], linear=bool(self.function.linear),
        )  # fmt: skip

    # -- derivatives ---------------------------------------------------------------------------------------------

    def jvp(self, mask: Mask) -> tuple[_PointApplication, Mask]:
        moved = {slot.name for slot, wanted in zip(self.free, mask, strict=True) if wanted}
        derivative = self.function.jvp(tuple(slot.name in moved for slot in self.function.inputs))
        return self._pruned(derivative)

    def derivatives(self, mask: Mask) -> list[tuple[Application, Mask, Mask]]:
        if self.jvp(mask)[0].function.num_fields <= MAX_FIELDS:
            return super().derivatives(mask)
        if self.function.taps:
            raise ValueError(
                f"the derivative of {self.name} has more than {MAX_FIELDS} fields, which is all that an operator of "
                "libCEED has room for, and cannot be split since it taps; tap less, or with tangents=False"
            )
        terms: list[tuple[Application, Mask, Mask]] = []
        count = len(self.function.outputs)
        for number in range(count):
            has = tuple(i == number for i in range(count))
            one = self.with_function(self.function.select(has))
            for group in one._groups(mask):
                derivative, takes = one.jvp(group)
                moved = iter(takes[len(mask) :])
                which = [chosen and next(moved) for wanted, chosen in zip(mask, group, strict=True) if wanted]
                if any(which):
                    terms.append((derivative, (*takes[: len(mask)], *which), has))
        return terms

    def _groups(self, mask: Mask) -> list[Mask]:
        """The inputs of a mask in groups, such that there is room for derivatives by each."""
        groups: list[list[bool]] = []
        room = 0
        for i, (slot, wanted) in enumerate(zip(self.free, mask, strict=True)):
            if not wanted:
                continue
            if not groups or len(slot.fields) > room:
                groups.append([False] * len(mask))
                room = MAX_FIELDS - self.function.num_fields
            groups[-1][i] = True
            room -= len(slot.fields)
        return [tuple(group) for group in groups]

    def transpose(self, mask: Mask) -> tuple[Application, Mask]:
        wanted = {slot.name for slot, undefined in zip(self.free, mask, strict=True) if undefined}
        if not wanted <= self.function.linear:
            raise TypeError(f"{self!r} is not linear in {', '.join(sorted(wanted - self.function.linear))}")
        transposed = self.function.transpose(tuple(slot.name in wanted for slot in self.function.inputs))
        return self._pruned(transposed)

    def select(self, mask: Mask) -> _PointApplication | None:
        count = len(self.function.outputs)
        if all(mask[count:]):
            return self.with_function(self.function.select(mask[:count]))
        return None if any(mask[count:]) else self.silent().with_function(self.function.silent().select(mask[:count]))

    def silent(self) -> _PointApplication:
        """The operator without taps."""
        return self.with_function(self.function.silent())

    def batched(self) -> _PointApplication:
        return self.with_function(self.function.batched())

    def _pruned(self, function: PointFunction) -> tuple[_PointApplication, Mask]:
        pruned = function.pruned()
        kept = {slot.name for slot in pruned.inputs}
        takes = tuple(
            slot.name in kept for slot in function.inputs if slot.kind != "weight" and slot.name not in self.bound
        )
        return self.with_function(pruned), takes

    def with_function(self, function: PointFunction) -> _PointApplication:
        """The application of another function, on the same elements and with the same bound values."""
        if function is self.function:
            return self
        application: _PointApplication = self.derived(
            function, lambda: _PointApplication(function, self.domain, self.bound)
        )
        return application

    def derived(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is made from this application once: programs that are traced again find the same."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


# -- public functions --------------------------------------------------------------------------------------------------


class PointOperator:
    """An operator as a JAX function of its fields; made by :func:`operator`.

    Attributes:
        inputs: names of the fields that a call takes, in this order; parameters come last, by the keyword `params`.
        outputs: names of the results.
    """

    _application: Any  # a _PointApplication; that of a sum has the same interface

    def __init__(self, application: _PointApplication, unravel: Callable[[Any], Any] | None, template: Any) -> None:
        self._application = application
        self._unravel = unravel
        self._template = template
        self.inputs = tuple(slot.name for slot in application.free if slot.kind != "parameters")
        self.outputs = tuple(slot.name for slot in application.function.outputs)
        self._call = jax.jit(lambda *arrays: apply(application, *arrays), inline=True)

    def __call__(self, *arrays: Any, params: Any = None, **named: Any) -> Any:
        """Applies the operator.

        Args:
            arrays, named: the fields: of shape ``V.shape`` for a field of a space V, of shape (elements, points,
                *shape) for ``quadrature(*shape)``.
            params: the parameters, a pytree like the one in the definition.

        Returns:
            the output, or a tuple of them when there are several, of these same shapes.

        Raises:
            TypeError: a missing or unknown field, or another element type.
            ValueError: another shape.
        """
        return self._results(self._call(*self._ordered(arrays, named, params)))

    def linearize(
        self, *arrays: Any, wrt: str, params: Any = None, stored: bool | None = None, **named: Any
    ) -> Linearization:
        """The derivative with respect to one field, at a point.

        Args:
            arrays, named, params: the point, as for a call.
            wrt: name of the field.
            stored: keep the point Jacobians at the quadrature points, or compute them at each use; None: what costs
                less, by their size.

        The Newton matrix of ``u^3`` on a line of the solution u = 2, which is 12 times the mass matrix:

        >>> import ceedtap as ct, jax, jax.numpy as jnp
        >>> jax.config.update("jax_enable_x64", True)
        >>> mesh = ct.mesh.box(1, 1)
        >>> V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=1)
        >>> @ct.operator(inputs=dict(u=V.value, x=V.geometry.grad, w=V.weight), outputs=dict(v=V.value))
        ... def cube(u, x, w):
        ...     return w * jnp.linalg.det(x) * u**3
        >>> newton = cube.linearize(2 * jnp.ones(4), mesh.points, wrt="u")
        >>> print(round(float(newton(jnp.ones(4)).sum()), 12), round(float(newton.assemble().todense().sum()), 12))
        12.0 12.0
        """
        return Linearization(self._application.silent(), wrt, self._ordered(arrays, named, params), stored)

    def _ordered(self, arrays: Sequence[Any], named: Mapping[str, Any], params: Any) -> list[Any]:
        """The arguments, checked, as the primitive takes them."""
        values = self._arguments(arrays, named)
        self._check_parameters(params)
        ordered = []
        for slot in self._application.free:
            if slot.kind == "parameters":
                ordered.append(self._parameters(params))
            else:
                ordered.append(self._field(slot, values[slot.name]))
        return ordered

    def _field(self, slot: Slot, value: Any) -> Any:
        """The array of a field, checked, in libCEED's type."""
        label = f"the field {slot.name} of {self._application.name}"
        dtype = self._application.dtype
        if slot.dtype is None:
            return check_array(label, value, slot.shape, dtype)
        if getattr(value, "dtype", None) != slot.dtype:
            got = getattr(value, "dtype", type(value).__name__)
            raise TypeError(f"{label} is {slot.dtype}, got {got}; convert it with .astype('{slot.dtype}')")
        return check_array(label, jnp.asarray(value).astype(dtype), slot.shape, dtype)

    def _arguments(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        signature = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self.inputs]
        )
        try:
            return dict(signature.bind(*arrays, **named).arguments)
        except TypeError as error:
            raise TypeError(f"{self._application.name}({', '.join(self.inputs)}): {error}") from None

    @property
    def _takes_parameters(self) -> bool:
        return any(slot.kind == "parameters" for slot in self._application.free)

    def _check_parameters(self, params: Any) -> None:
        """That there are some where some are given."""
        if params is not None and not self._takes_parameters:
            bound = " but those that are bound" if self._template is not None else ""
            raise TypeError(f"{self._application.name} has no parameters{bound}, got {params!r}")

    def _parameters(self, params: Any) -> Any:
        given: Any = jax.tree.structure(params)
        expected: Any = jax.tree.structure(self._template)
        if given != expected:
            raise TypeError(f"the parameters of {self._application.name} are like {expected}, got {given}")
        for leaf, template in zip(jax.tree.leaves(params), jax.tree.leaves(self._template), strict=True):
            if jnp.shape(leaf) != jnp.shape(template):
                expected, got = jnp.shape(template), jnp.shape(leaf)
                raise ValueError(f"a parameter of {self._application.name} has the shape {expected}, got {got}")
        return ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, self._application.dtype), params))[0]

    def bind(self, *, params: Any = None, **fields: Any) -> PointOperator:
        """The operator with some fields fixed. Constants stay in libCEED, which then need not look at them again.

        Args:
            params: the parameters, to fix them as well.
            fields: by name.

        Raises:
            TypeError: no such field, or values that are only known when a program runs.
            ValueError: another shape.
        """
        application = self._application
        bound = dict(application.bound)
        for name, value in fields.items():
            slots = [slot for slot in application.free if slot.name == name and slot.kind != "parameters"]
            if not slots:
                raise TypeError(f"{application.name} has no field {name}; it has {', '.join(self.inputs)}")
            _check_known(f"the field {name} of {application.name}", value)
            with jax_compat.concrete():
                bound[name] = np.array(self._field(slots[0], value))
        if params is not None:
            self._check_parameters(params)
            for leaf in jax.tree.leaves(params):
                _check_known(f"the parameters of {application.name}", leaf)
            with jax_compat.concrete():
                bound["params"] = np.array(self._parameters(params))
        return PointOperator(
            _PointApplication(application.function, application.domain, bound), self._unravel, self._template
        )

    def reference(self, *arrays: Any, params: Any = None, **named: Any) -> Any:
        """The same as a call, in plain JAX, without libCEED: to compare with."""
        return self._results(self._application.silent().evaluate(*self._ordered(arrays, named, params)))

    @property
    def _out_slots(self) -> Sequence[Slot]:
        outputs: Sequence[Slot] = self._application.function.outputs
        return outputs

    def _results(self, outs: Sequence[Any]) -> Any:
        outs = [as_integers(out, slot.dtype) for out, slot in zip(outs, self._out_slots, strict=True)]
        return outs[0] if len(outs) == 1 else tuple(outs)

    @property
    def name(self) -> str:
        """Name of the operator."""
        return str(self._application.name)

    @property
    def ceed(self) -> Ceed:
        """The Ceed that the operator is on."""
        ceed: Ceed = self._application.domain.ceed
        return ceed

    def on(self, ceed: Ceed) -> PointOperator:
        """The same operator on another Ceed: another backend, or one that works beside the first.

        >>> import ceedtap as ct, jax, jax.numpy as jnp
        >>> jax.config.update("jax_enable_x64", True)
        >>> V = ct.Space(ct.Ceed("/cpu/self/ref/serial"), ct.mesh.box(2, 2), degree=1)
        >>> mass = ct.operator(inputs=dict(u=V.value, w=V.weight), outputs=dict(v=V.value))(lambda u, w: u * w)
        >>> print(mass.on(ct.Ceed("/cpu/self/opt/blocked"))(jnp.ones(9)).sum().round(12))
        16.0
        """
        application = self._application

        def move(slot: Slot) -> Slot:
            fields = (f if f.space is None else replace(f, space=f.space.on(ceed)) for f in slot.fields)
            return replace(slot, fields=tuple(fields))

        old = application.function
        inputs, outputs = tuple(map(move, old.inputs)), tuple(map(move, old.outputs))
        if ceed.library.scalar_dtype != old.dtype:
            raise TypeError(
                f"{old.name} computes in {old.dtype}, {ceed!r} in {ceed.library.scalar_dtype}; define it for that Ceed"
            )
        function = replace(
            old, inputs=inputs, outputs=outputs, function=jax_compat.jaxpr_function(old.traced), _cache={}
        )
        domain = _Domain({slot.name: slot.fields for slot in (*inputs, *outputs)})
        moved = _PointApplication(function, domain, application.bound)
        return PointOperator(moved, self._unravel, self._template)

    @property
    def source(self) -> str:
        """The C source of the QFunction."""
        return self._application.function.source[0]

    def __add__(self, other: Any) -> OperatorSum:
        """The sum of two operators, such as one on the cells and one on the boundary: an operator again.

        Its inputs are those of both, by name; the outputs are the same ones. Parameters are a dict by the names of the
        operators. It is one composite operator of libCEED; derivatives, `linearize`, `bind` and `reference` are as of
        all operators.

        Raises:
            ValueError: the operators do not fit together.

        The mass matrix of a square and of its boundary, summed up:

        >>> import ceedtap as ct, jax, jax.numpy as jnp
        >>> jax.config.update("jax_enable_x64", True)
        >>> V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)
        >>> S, X = V.boundary(), V.geometry
        >>> @ct.operator(inputs=dict(u=V.value, x=X.grad, w=X.weight), outputs=dict(v=V.value))
        ... def cells(u, x, w):
        ...     return w * jnp.linalg.det(x) * u
        >>> @ct.operator(inputs=dict(u=S.value, x=S.geometry.grad, w=S.weight), outputs=dict(v=S.value))
        ... def facets(u, x, w):
        ...     return w * jnp.linalg.norm(ct.normal(x)) * u
        >>> total = cells + facets
        >>> total
        <OperatorSum cells + facets: (u, x) -> v>
        >>> print(round(float(total(jnp.ones(V.shape), V.mesh.points).sum()), 12))
        5.0
        """
        from ceedtap.operator_sum import OperatorSum

        if not isinstance(other, PointOperator):
            return NotImplemented
        return OperatorSum([*self._parts(), *other._parts()])

    def __radd__(self, other: Any) -> PointOperator:
        """``0 + op`` is `op`, for Python's `sum`."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def _parts(self) -> tuple[PointOperator, ...]:
        """What it adds to a sum."""
        return (self,)

    def __repr__(self) -> str:
        return f"<PointOperator {self._application.name}({', '.join(self.inputs)}) -> {', '.join(self.outputs)}>"


def operator(
    *, inputs: Mapping[str, Fields], outputs: Mapping[str, Fields], params: Any = None, name: str | None = None
) -> Callable[[Callable[..., Any]], PointOperator]:
    """Makes an operator of a function of one quadrature point, written with `jax.numpy`.

    The function is called with the values of the inputs at the point, by the names of its parameters, and returns the
    values of the outputs: one value, or a tuple or dict of them when there are several outputs. Where a field is a
    tuple of evaluations of one array, such as ``(V.value, V.grad)``, it is a tuple there as well. For an output,
    ``V.value`` stands for the factor of the test function, ``V.grad`` for that of its derivatives.

    JAX differentiates the function, and it is translated to C, so the operator and all its derivatives are libCEED
    operators that run inside compiled programs.

    Args:
        inputs: by name: ``V.value``, ``V.grad``, ``V.weight`` of a :class:`ceedtap.Space`, :func:`ceedtap.quadrature`,
            or a tuple of fields of one space.
        outputs: the same, without weights.
        params: an example of the parameters, a pytree of numbers and arrays; the function gets them as ``params``. A
            change of their values needs no new tracing and no compiler.
        name: of the operator; by default that of the function.

    Raises:
        TypeError, ValueError: the function or its fields do not fit together.
        ceedtap.codegen.TranslationError: something in the function cannot be translated to C; raised when a program is
            compiled.

    The diffusion operator with its geometry computed from the coordinates, and the derivative of an energy with respect
    to those:

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> jax.config.update("jax_enable_x64", True)
    >>> mesh = ct.mesh.box(2, 2, 2)
    >>> V = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=2)
    >>> X = V.geometry
    >>> @ct.operator(inputs=dict(u=V.grad, x=X.grad, w=X.weight), outputs=dict(v=V.grad))
    ... def diffusion(u, x, w):
    ...     K = jnp.linalg.inv(x.T)
    ...     return w * jnp.linalg.det(x) * K @ K.T @ u
    >>> u = jnp.asarray(V.nodes[:, 0])
    >>> energy = jax.jit(lambda x: u @ diffusion(u, x) / 2)
    >>> print(round(float(energy(mesh.points)), 12))
    0.5
    >>> jax.grad(energy)(jnp.asarray(mesh.points)).shape
    (27, 3)
    """

    def decorate(function: Callable[..., Any]) -> PointOperator:
        label = name or str(getattr(function, "__name__", "point_function"))
        return _make(function, label, inputs, outputs, params)

    return decorate


def _make(
    function: Callable[..., Any], name: str, inputs: Mapping[str, Fields], outputs: Mapping[str, Fields], params: Any
) -> PointOperator:
    fields = {n: _as_fields(n, f) for n, f in [*inputs.items(), *outputs.items()]}
    if overlap := set(inputs) & set(outputs):
        raise ValueError(f"inputs and outputs of {name} have different names; both have {', '.join(sorted(overlap))}")
    if not outputs:
        raise ValueError(f"the operator {name} has no outputs")
    domain = _Domain(fields)
    in_slots = [replace(domain.slot(n, fields[n]), as_tuple=_is_tuple(inputs[n])) for n in inputs]
    out_slots = [domain.slot(n, fields[n]) for n in outputs]
    if any(slot.kind == "weight" for slot in out_slots):
        raise ValueError(f"a weight of {name} is an output; weights are inputs")
    unravel = None
    if params is not None:
        flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, domain.dtype), params))
        in_slots.append(Slot("params", "parameters", (Field(None, EvalMode.NONE, flat.shape),), flat.shape))

    def flat_function(*values: Any) -> list[Any]:
        arguments = point_function.named(values, unravel)
        return _flat_outputs(name, function(**arguments), out_slots, outputs, domain.dtype)

    points = domain.num_elem, domain.num_points
    point_function = PointFunction(name, tuple(in_slots), tuple(out_slots), flat_function, domain.dtype, points=points)
    point_function.jaxpr  # noqa: B018  traced here, where the user's line is in the traceback
    return PointOperator(_PointApplication(point_function, domain, {}), unravel, params)


def _check_known(label: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{label} can be bound to known values only; pass what a program computes to the call")


def _is_tuple(fields: Fields) -> bool:
    return not isinstance(fields, Field)


def _as_fields(name: str, fields: Fields) -> tuple[Field, ...]:
    values = tuple(fields) if isinstance(fields, Sequence) else (fields,)
    if not values or not all(isinstance(f, Field) for f in values):
        raise TypeError(f"{name}: expected a field such as V.value or V.grad, or a tuple of them, got {fields!r}")
    return values


def _flat_outputs(
    name: str, result: Any, slots: Sequence[Slot], outputs: Mapping[str, Fields], dtype: np.dtype
) -> list[Any]:
    """The values that a point function has returned, checked, in the order of the slots."""
    if isinstance(result, Mapping):
        if set(result) != set(outputs):
            raise ValueError(f"{name} returned the outputs {sorted(result)}, it has {sorted(outputs)}")
        parts = [result[slot.name] for slot in slots]
    elif len(slots) == 1:
        parts = [result]
    elif isinstance(result, tuple) and len(result) == len(slots):
        parts = list(result)
    else:
        raise ValueError(f"{name} returns a tuple or dict of {len(slots)} outputs, got {type(result).__name__}")
    flat = []
    for slot, part in zip(slots, parts, strict=True):
        values = part if _is_tuple(outputs[slot.name]) else (part,)
        if len(values) != len(slot.fields):
            raise ValueError(f"the output {slot.name} of {name} has {len(slot.fields)} parts, got {len(values)}")
        for field, value in zip(slot.fields, values, strict=True):
            value = jnp.asarray(value)
            if value.shape != field.shape:
                raise ValueError(f"the output {slot.name} of {name} has the shape {field.shape}, got {value.shape}")
            kinds = "fiu" if field.dtype is None else "b" if field.dtype == np.bool_ else "iu"
            if np.dtype(value.dtype).kind not in kinds:
                wanted = "real" if field.dtype is None else field.dtype
                raise TypeError(f"the output {slot.name} of {name} is {wanted}, got {value.dtype}")
            flat.append(value.astype(dtype))
    return flat
