"""Watching operators for points at which something is wrong: `watch`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.fields import Field
from ceedtap.host_functions import check_function, check_result
from ceedtap.operator_sum import OperatorSum
from ceedtap.point_operator import PointOperator
from ceedtap.point_taps import InputsWanted
from ceedtap.primitive import id_tap

logger = logging.getLogger("ceedtap")

#: Points that the text of :class:`Offenders` shows.
SHOWN = 5


@dataclass(frozen=True, eq=False)
class Offenders:
    """The quadrature points at which a watched operator met its condition, in one event.

    Attributes:
        operator: name of the operator.
        lanes: (n, number of nested `vmap`) the lane of each offender, the outermost `vmap` first.
        elements, points: (n,) numbers of the element, and of the point in the element.
        coordinates: (n, dim of the mesh) physical coordinates, by the mesh's own points; (n, 0) where there is no mesh.
        finite: (n,) whether all values there are finite; if so, `where` holds.
        values: by name, arrays (n, ...) of what `show` returns, or of the operator's inputs.
    """

    operator: str
    lanes: np.ndarray
    elements: np.ndarray
    points: np.ndarray
    coordinates: np.ndarray
    finite: np.ndarray
    values: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.elements)

    def __str__(self) -> str:
        lines = [self._line(i) for i in range(min(len(self), SHOWN))]
        if len(self) > SHOWN:
            lines.append(f"and {len(self) - SHOWN} more points")
        return "\n".join(f"{self.operator}: {line}" for line in lines)

    def _line(self, i: int) -> str:
        lane = f"lane {', '.join(map(str, self.lanes[i]))} " if self.lanes.shape[1] else ""
        at = f" at ({', '.join(f'{x:.6g}' for x in self.coordinates[i])})" if self.coordinates.shape[1] else ""
        values = ", ".join(
            f"{name} = {np.array2string(value[i], precision=6, separator=', ').replace(chr(10), '')}"
            for name, value in self.values.items()
        )
        wrong = "" if self.finite[i] else "not finite: "
        return f"{lane}element {self.elements[i]} point {self.points[i]}{at}: {wrong}{values}"


def _log(offenders: Offenders) -> None:
    logger.warning("%s", offenders)


def watch(
    op: PointOperator,
    where: Callable[..., Any] | None = None,
    *,
    nan: bool = True,
    show: Callable[..., Any] | None = None,
    then: Callable[[Offenders], None] = _log,
) -> PointOperator:
    """The same operator, that tells where something goes wrong inside.

    Wherever a value at a quadrature point is not finite, or `where` holds, there is an event with the elements, points,
    coordinates and values of all such points. As long as there is none, the operator writes one number for each point
    more than it did, and nothing leaves the program.

    Args:
        op: made by :func:`ceedtap.operator`.
        where: a function of the operator's inputs at a point, of all or some of them by name: whether to report it.
        nan: report points where an input or output is not finite.
        show: a function like `where`: what to report, one value or a dict of values by name; by default the inputs.
        then: gets the :class:`Offenders`, on the receiver thread. By default they are logged as a warning of the logger
            ``ceedtap``. What it raises is raised by :func:`ceedtap.barrier_wait`.

    Raises:
        TypeError: `op` is no point operator, or `where` takes something that is no input of it, or is not boolean.

    >>> import ceedtap as ct, jax, jax.numpy as jnp, numpy as np
    >>> jax.config.update("jax_enable_x64", True)
    >>> V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 1), degree=1, quadrature=1)
    >>> @ct.operator(inputs=dict(u=V.value, w=V.weight), outputs=dict(v=V.value))
    ... def root(u, w):
    ...     return w * jnp.sqrt(u)
    >>> watched = ct.watch(root, show=lambda u: {"u": u}, then=print)
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(watched)(jnp.array([1.0, 1.0, -8.0, 1.0, 1.0, -8.0]))
    root: element 1 point 0 at (0.75, 0.5): not finite: u = -3.5
    """
    if not isinstance(op, PointOperator) or isinstance(op, OperatorSum):
        raise TypeError(
            f"watch takes an operator made by ceedtap.operator, got {type(op).__name__}; of a sum, watch the terms"
        )
    check_function(then, "then=")
    application, unravel = op._application, op._unravel
    function = application.function
    names = [slot.name for slot in function.inputs]
    condition = _taking("where", where, names)
    watcher = _Watcher(op, _taking("show", show, names), then)
    evaluate = jax_compat.jaxpr_function(function.traced)

    def watched(*values: Any) -> Any:
        outs = evaluate(*values)
        code = jnp.zeros((), function.dtype)
        if condition is not None:
            held = jnp.asarray(condition(function.named(values, unravel)))
            if held.dtype != np.bool_ or held.shape:
                raise TypeError(
                    f"where= of the watched {function.name} returns one boolean, got {held.dtype} of shape {held.shape}"
                )
            code = jnp.where(held, 1.0, code)
        if nan:
            finite = [jnp.all(jnp.isfinite(value)) for value in (*values, *outs)]
            code = jnp.where(jnp.all(jnp.stack(finite)), code, 2.0)
        id_tap(watcher, code, when=code != 0, tangents=False)
        return outs

    new = replace(function, function=watched, _cache={})
    new.jaxpr  # noqa: B018  traced here, where errors belong
    return PointOperator(application.with_function(new), unravel, op._template)


def _taking(name: str, function: Callable[..., Any] | None, inputs: Sequence[str]) -> Callable[[Mapping], Any] | None:
    """The function, called with a mapping of the inputs that it takes."""
    if function is None:
        return None
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = inputs if everything else [p.name for p in parameters if p.default is p.empty or p.name in inputs]
    if unknown := [parameter for parameter in wanted if parameter not in inputs]:
        raise TypeError(f"{name}= takes inputs of the operator by name, {', '.join(inputs)}; got {', '.join(unknown)}")
    return lambda named: function(**{key: named[key] for key in wanted})


# -- on the host -------------------------------------------------------------------------------------------------------


class _Watcher(InputsWanted):
    """Finds out about the points whose code is not 0: 1, the condition holds; 2, something is not finite."""

    def __init__(
        self, op: PointOperator, show: Callable[[Mapping], Any] | None, then: Callable[[Offenders], Any]
    ) -> None:
        super().__init__(self._report, name=f"watch {op._application.name}")
        self._op = op
        self._show = show
        self._then = then

    def _report(
        self, codes: np.ndarray, inputs: dict[str, np.ndarray], operator: str, transforms: Any = (), **_: Any
    ) -> None:
        leaves, treedef = jax.tree.flatten((codes, inputs))
        batches = [parameters["batch_dims"] for _, parameters in reversed(transforms)]
        for depth, dims in enumerate(batches):
            # The outermost batch in front, then the next; an array that is the same in all lanes has one of length 1.
            leaves = [
                np.expand_dims(leaf, depth) if axis is None else np.moveaxis(leaf, depth + axis, depth)
                for leaf, axis in zip(leaves, dims, strict=True)
            ]
        codes, inputs = jax.tree.unflatten(treedef, leaves)
        found = np.argwhere(codes)
        lanes, elements, points = found[:, : len(batches)], found[:, -2], found[:, -1]
        at = _Points(tuple(lanes.T), elements, points)
        offenders = Offenders(
            operator, lanes, elements, points, self._coordinates(at), codes[tuple(found.T)] != 2,
            self._values(inputs, at),
        )  # fmt: skip
        check_result(self._then(offenders), self._then, "then=")

    def _coordinates(self, at: _Points) -> np.ndarray:
        geometry = getattr(self._op._application.domain.space, "geometry", None)
        if geometry is None:  # a space without a mesh
            return np.zeros((len(at.elements), 0))
        return replace(at, lanes=()).of(geometry.value, geometry.mesh.points)

    def _values(self, inputs: Mapping[str, np.ndarray], at: _Points) -> dict[str, np.ndarray]:
        application = self._op._application
        function = application.function
        values, axes, shown = [], [], {}
        for slot in function.inputs:
            bound = slot.name in application.bound
            x: Any = application.bound[slot.name] if bound else inputs.get(slot.name)
            here = replace(at, lanes=()) if bound else at
            for name, field in zip(slot.field_names(), slot.fields, strict=True):
                if slot.kind == "weight":
                    value = application.domain.space.weights[at.points]
                elif slot.kind == "parameters":
                    value = x[here.lane_of(x)] if here.lanes else x
                else:
                    value = shown[name] = here.of(field, x)
                values.append(value)
                axes.append(None if slot.kind == "parameters" and not here.lanes else 0)
        if self._show is None:
            return shown
        show = self._show
        # Of as many points as a power of two, so that JAX need not compile for each number of offenders.
        count = len(at.points)
        index = np.minimum(np.arange(1 << (count - 1).bit_length()), count - 1)
        padded = [value if axis is None else value[index] for value, axis in zip(values, axes, strict=True)]
        result = jax.vmap(lambda *v: show(function.named(v, self._op._unravel)), axes)(*padded)
        result = result if isinstance(result, Mapping) else {"value": result}
        return {name: np.asarray(value)[:count] for name, value in result.items()}


@dataclass(frozen=True)
class _Points:
    """Some quadrature points: n lanes (for each nested batch), elements and points."""

    lanes: tuple[np.ndarray, ...]
    elements: np.ndarray
    points: np.ndarray

    def lane_of(self, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """Indices of the lanes in an array, which has one lane where it is the same in all."""
        return tuple(np.minimum(lane, n - 1) for lane, n in zip(self.lanes, x.shape, strict=False))

    def of(self, field: Field, x: Any) -> np.ndarray:
        """The values of a field: (n, *field.shape)."""
        lanes = self.lane_of(x)
        if field.space is None:
            return np.asarray(x[(*lanes, self.elements, self.points)])
        space = field.space
        flat = np.reshape(x, (*x.shape[: len(lanes)], -1))
        local = flat[(*(lane[:, None, None] for lane in lanes), space.element_dofs[self.elements])]
        if space.orientation is not None:
            local = local * space.orientation[self.elements]
        values = np.einsum("npv,npc->nvc", space.table(field.eval_mode)[self.points], local)
        return values.reshape(len(self.elements), *field.shape)
