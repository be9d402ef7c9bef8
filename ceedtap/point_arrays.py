"""Compiled point functions over plain arrays: `pointwise`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat, point_taps
from ceedtap.apply import Application, Mask, Registry, apply
from ceedtap.ceed_constants import EvalMode
from ceedtap.ceed_ffi import load
from ceedtap.fields import Field
from ceedtap.native import ffi, lib
from ceedtap.plain_arrays import check_plain
from ceedtap.point_function import PointFunction, Slot
from ceedtap.toolchain import compile_qfunction

_FUNCTIONS = Registry(lib.ct_pointwise_functions())
_lower = jax_compat.lower_ffi("ceedtap_pointwise")


class _Pointwise(Application):
    """A point function of plain arrays; the points are what batching adds in front."""

    def __init__(self, function: PointFunction) -> None:
        self.function = function
        self.name = function.name
        self.in_shapes = tuple(slot.shape for slot in function.inputs)
        self.out_shapes = tuple(slot.shape for slot in function.results)
        self.num_tapped = len(function.results) - len(function.outputs)
        self.linear = frozenset(i for i, slot in enumerate(function.inputs) if slot.name in function.linear)
        self.dtype = function.dtype

    @functools.cached_property
    def key(self) -> int:
        source, name = self.function.source
        compiled = compile_qfunction(load(), source, name)
        entry = ffi.new("ct_pointwise *")
        slots = (*self.function.inputs, *self.function.results)
        sizes = ffi.new("int64_t[]", [slot.size for slot in slots])
        entry.function = ffi.cast(ffi.typeof(entry.function), compiled.address)
        entry.num_in, entry.num_out = len(self.in_shapes), len(self.out_shapes)
        entry.sizes = sizes
        entry.key = key = _FUNCTIONS.enter(self, entry, (sizes, compiled))
        return key

    def call(self, ctx: jax_compat.LoweringRuleContext, *operands: Any) -> Any:
        return _lower(ctx, *operands, function=np.uint64(self.key)).results

    def evaluate(self, *inputs: Any) -> list[Any]:
        return jax_compat.jaxpr_function(self.function.jaxpr)(*inputs)

    def emit(self, tapped: Sequence[Any], inputs: Sequence[Any]) -> None:
        point_taps.emit(self.function.taps, tapped, {}, linear=bool(self.function.linear))

    def batched(self) -> Application:
        return self._of(self.function.batched())

    def jvp(self, mask: Mask) -> tuple[Application, Mask]:
        return self._pruned(self.function.jvp(mask))

    def transpose(self, mask: Mask) -> tuple[Application, Mask]:
        return self._pruned(self.function.transpose(mask))

    def with_results(self, mask: Mask) -> Application:
        return self._of(self.function.select(mask))

    def silent(self) -> Application:
        return self._of(self.function.silent())

    def _pruned(self, function: PointFunction) -> tuple[Application, Mask]:
        return self._of(function.pruned()), function.used

    def _of(self, function: PointFunction) -> _Pointwise:
        application: _Pointwise = self.derived(function, lambda: _Pointwise(function))
        return application


def pointwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A fast replacement of ``jax.jit(jax.vmap(function))`` for a function of small float64 arrays.

    The function is translated to C, in which a loop over the points is vectorised; its derivatives as well. It works
    under all transformations of JAX.

    Args:
        function: of arrays, returning an array or a pytree of arrays.

    Returns:
        a function of arrays with one more axis in front, the points, that returns such arrays.

    Raises:
        TypeError: an argument is not float64.
        ValueError: arguments with different numbers of points.
        ceedtap.codegen.TranslationError: something in the function cannot be translated.

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> jax.config.update("jax_enable_x64", True)
    >>> f = ct.pointwise(lambda F: jnp.log(jnp.linalg.det(F)))
    >>> F = 2 * jnp.broadcast_to(jnp.eye(3), (5, 3, 3))
    >>> f(F).round(6)
    Array([2.079442, 2.079442, 2.079442, 2.079442, 2.079442], dtype=float64)
    >>> jax.grad(lambda F: f(F).sum())(F)[0]
    Array([[0.5, 0. , 0. ],
           [0. , 0.5, 0. ],
           [0. , 0. , 0.5]], dtype=float64)
    """

    @functools.cache
    def compiled(shapes: tuple[tuple[int, ...], ...]) -> tuple[_Pointwise, Any]:
        def slots(prefix: str, shapes_: Sequence[tuple[int, ...]]) -> tuple[Slot, ...]:
            return tuple(
                Slot(f"{prefix}{i}", "quadrature", (Field(None, EvalMode.NONE, shape),), shape)
                for i, shape in enumerate(shapes_)
            )

        dtype = np.dtype(np.float64)
        results = jax.eval_shape(function, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
        leaves, treedef = jax.tree.flatten(results)

        def flat(*values: Any) -> list[Any]:
            return [jnp.asarray(leaf, dtype) for leaf in jax.tree.leaves(function(*values))]

        name = getattr(function, "__name__", "function")
        point_function = PointFunction(
            name, slots("x", shapes), slots("y", [leaf.shape for leaf in leaves]), flat, dtype
        )
        return _Pointwise(point_function), treedef

    @functools.wraps(function)
    def over_points(*arrays: Any) -> Any:
        for i, a in enumerate(arrays):
            check_plain(f"argument {i} of {over_points.__name__}", a)
        values = [jnp.asarray(a) for a in arrays]
        for i, value in enumerate(values):
            if value.dtype != np.float64:
                raise TypeError(f"argument {i} of {over_points.__name__} is float64, got {value.dtype}")
            if not value.ndim or value.shape[0] != values[0].shape[0]:
                raise ValueError(
                    f"the arguments of {over_points.__name__} have one number of points in front, got "
                    f"{[v.shape for v in values]}"
                )
        application, treedef = compiled(tuple(value.shape[1:] for value in values))
        return jax.tree.unflatten(treedef, apply(application, *values))

    return over_points
