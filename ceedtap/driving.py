"""Host work on tapped values: operators that are applied to every event, beside the program that taps: `drive`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ceedtap.ceed import Ceed, CompositeOperator, Operator
from ceedtap.consumer import Consumer, OnError, Policy
from ceedtap.host_functions import check_function, check_result
from ceedtap.operators import embed
from ceedtap.point_operator import PointOperator


class Drive(Consumer):
    """A consumer that applies an operator to every event; made by :func:`drive`.

    Attributes:
        op: what is applied.
        steps: events so far.
    """

    def __init__(self, op: Callable[..., Any], then: Callable[..., Any], name: str | None, **options: Any) -> None:
        called = str(getattr(op, "name", None) or getattr(op, "__name__", type(op).__name__))
        super().__init__(self._event, name=name or f"drive {called}", **options)
        self.op = op
        self.steps = 0
        self._then = then
        self._tells_step = _takes_step(then)

    def _event(self, *args: Any, transforms: Any = (), **_: Any) -> None:
        if any(name == "jvp" for name, _ in transforms):
            return  # tangents and cotangents are no states
        leaves, treedef = jax.tree.flatten(args)

        def function(*leaves: Any) -> Any:
            args = jax.tree.unflatten(treedef, leaves)
            return self.op(**args[0]) if len(args) == 1 and isinstance(args[0], Mapping) else self.op(*args)

        for _, parameters in transforms:  # batches, the innermost first
            function = jax.vmap(function, parameters["batch_dims"])
        result = function(*leaves)
        check_result(result, self.op, "the function of drive")
        result = jax.tree.map(np.asarray, result)
        step, self.steps = self.steps, self.steps + 1
        said = self._then(
            *(result if isinstance(result, tuple) else (result,)), **({"step": step} if self._tells_step else {})
        )
        check_result(said, self._then, "then=")


def _aside(op: PointOperator) -> PointOperator:
    """The operator on a Ceed of its own, if all of its spaces can be moved."""
    try:
        return op.on(Ceed(op.ceed.get_resource(), library=op.ceed.library))
    except TypeError:
        return op


def _takes_step(then: Callable[..., None]) -> bool:
    try:
        parameters = inspect.signature(then).parameters.values()
    except ValueError:  # some functions in C do not tell
        return False
    return any(p.name == "step" or p.kind is p.VAR_KEYWORD for p in parameters)


def drive(
    op: PointOperator | Operator | CompositeOperator | Callable[..., Any],
    then: Callable[..., None],
    *,
    ceed: Ceed | None = None,
    policy: Policy = "block",
    every: int = 1,
    on_error: OnError = "raise",
    name: str | None = None,
) -> Drive:
    """A consumer for :func:`ceedtap.id_tap` that applies an operator to the tapped values, beside the program.

    The program goes on while the operator is applied on the receiver thread; if that is slower than the events come,
    the `policy` decides. Results come in the order of the events. Events of derivatives are left out; a batch is one
    event with a batch of results.

    Args:
        op: an operator made by :func:`ceedtap.operator`, which is moved to a Ceed of its own if its spaces have a mesh,
            so that it does not wait for the program's operators; a libCEED operator with one active input and output,
            on whatever Ceed it is; or any function of arrays (for batches, one that JAX can trace). It gets what is
            tapped as its arguments; a dict is passed by name.
        then: called with the results, NumPy arrays, and with ``step=``, the number of the event, if it takes that.
            Another :class:`Drive` applies its operator to the results.
        ceed: where a point operator goes; None: a new Ceed of the same backend.
        policy, every, on_error, name: as for :class:`ceedtap.Consumer`.

    Raises:
        TypeError: `op` or `then` is nothing that can be called.

    The L2 norm of the solution after every step:

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> jax.config.update("jax_enable_x64", True)
    >>> V = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)
    >>> mass = ct.operator(inputs=dict(u=V.value, w=V.weight), outputs=dict(v=V.value))(lambda u, w: w * u / 16)
    >>> def show(v, step):
    ...     print(step, v.sum().round(6))
    >>> norm = ct.drive(mass, show)
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda u: jax.lax.fori_loop(0, 3, lambda i, u: ct.id_tap(norm, u) / 2, u))(jnp.ones(9))
    0 1.0
    1 0.5
    2 0.25
    """
    if not callable(then):
        raise TypeError(f"then= is called with the results, got {type(then).__name__}")
    if isinstance(op, PointOperator):
        op = _aside(op) if ceed is None else op.on(ceed)
    elif ceed is not None:
        raise TypeError("ceed= is for operators made by ceedtap.operator; others stay on the Ceed that they are on")
    elif isinstance(op, (Operator, CompositeOperator)):
        op = embed(op)
    if not callable(op):
        raise TypeError(f"drive applies an operator or a function, got {type(op).__name__}")
    check_function(op, "the function of drive")
    check_function(then, "then=")
    return Drive(op, then, name, policy=policy, every=every, on_error=on_error)
