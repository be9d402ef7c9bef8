"""Operators whose physics is a JAX function of one quadrature point: `operator`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from ceedtap import jax_compat
from ceedtap.apply import apply, check_array
from ceedtap.ceed import Ceed, EvalMode
from ceedtap.domain import Domain
from ceedtap.fields import Field, from_scalars
from ceedtap.linearize import Linearization
from ceedtap.plain_arrays import check_plain
from ceedtap.point_application import PointApplication
from ceedtap.point_function import PointFunction, Slot

if TYPE_CHECKING:
    from ceedtap.operator_sum import OperatorSum

Fields = Field | Sequence[Field]


class PointOperator:
    """An operator as a JAX function of its fields; made by :func:`operator`.

    Attributes:
        inputs: names of the fields that a call takes, in this order; parameters come last, by the keyword `params`.
        outputs: names of the results.
    """

    _application: Any  # a PointApplication; that of a sum has the same interface

    def __init__(self, application: PointApplication, unravel: Callable[[Any], Any] | None, template: Any) -> None:
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

    def gradient(self, wrt: str) -> PointOperator:
        """The gradient of an energy by one of its fields, such as the forces: an operator of the same inputs.

        The energy is an operator with one output, a number at each quadrature point, ``quadrature()``; all of them
        summed up are its value. What :meth:`linearize` makes of the gradient is the Hessian.

        Args:
            wrt: name of the field.

        Returns:
            the operator; its output is like the field and is called ``grad_`` and the field's name.

        Raises:
            ValueError: no energy, or no such real field.

        >>> import ceedtap as ct, jax, jax.numpy as jnp
        >>> jax.config.update("jax_enable_x64", True)
        >>> V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(1, 1), degree=1)
        >>> energy = ct.operator(inputs=dict(u=V.value, w=V.weight), outputs=dict(e=ct.quadrature()))(
        ...     lambda u, w: w * u**4 / 4)
        >>> force = energy.gradient("u")
        >>> u = 2 * jnp.ones(4)
        >>> print(round(float(energy(u).sum()), 12), round(float(force(u).sum()), 12))
        16.0 32.0
        >>> print(round(float(force.linearize(u, wrt="u").assemble().todense().sum()), 12))
        48.0
        """
        function = self._application.function
        outputs = function.outputs
        if len(outputs) != 1 or outputs[0].kind != "quadrature" or outputs[0].size != math.prod(function.points):
            raise ValueError(
                f"{self.name} is no energy: that has one output, a number at each quadrature point, quadrature(); it "
                f"has {', '.join(f'{slot.name} {slot.fields[0]!r}' for slot in outputs)}"
            )
        names = [slot.name for slot in self._application.free if slot.kind != "parameters" and slot.dtype is None]
        if wrt not in names:
            raise ValueError(f"{self.name} has a gradient by {', '.join(names)}, got {wrt!r}")
        number = [slot.name for slot in function.inputs].index(wrt)
        application = self._application.with_function(function.gradient(number))
        return PointOperator(application, self._unravel, self._template)

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
        given = getattr(value, "dtype", None)
        # Numbers of materials come from files in any type of integers.
        if given != slot.dtype and not (slot.dtype.kind in "iu" and given is not None and np.dtype(given).kind in "iu"):
            got = given if given is not None else type(value).__name__
            raise TypeError(f"{label} is {slot.dtype}, got {got}; convert it with .astype('{slot.dtype}')")
        check_plain(label, value)
        return check_array(label, jnp.asarray(value).astype(slot.dtype).astype(dtype), slot.shape, dtype)

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
            check_plain(f"the parameters of {self._application.name}", leaf)
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
            PointApplication(application.function, application.domain, bound), self._unravel, self._template
        )

    def reference(self, *arrays: Any, params: Any = None, **named: Any) -> Any:
        """The same as a call, in plain JAX, without libCEED: to compare with."""
        return self._results(self._application.silent().evaluate(*self._ordered(arrays, named, params)))

    @property
    def _out_slots(self) -> Sequence[Slot]:
        outputs: Sequence[Slot] = self._application.function.outputs
        return outputs

    def _results(self, outs: Sequence[Any]) -> Any:
        outs = [from_scalars(out, slot.dtype) for out, slot in zip(outs, self._out_slots, strict=True)]
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
        domain = Domain({slot.name: slot.fields for slot in (*inputs, *outputs)})
        moved = PointApplication(function, domain, application.bound)
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
    domain = Domain(fields)
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
    return PointOperator(PointApplication(point_function, domain, {}), unravel, params)


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
