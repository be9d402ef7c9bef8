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
from ceedtap.arguments import exact
from ceedtap.ceed_constants import EvalMode
from ceedtap.ceed_ffi import load
from ceedtap.fields import Field, from_scalars
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


# -- values of all types as the float64 that the compiled code takes -------------------------------------------------

_LOW = 32  # bits of a 64-bit integer that go into one of two numbers, since float64 is exact to 53 only


def _parts(dtype: np.dtype) -> int:
    """How many float64 stand for a value of this type."""
    return 2 if dtype.kind == "c" or (dtype.kind in "iu" and dtype.itemsize == 8) else 1


def _to_numbers(x: Any) -> list[Any]:
    """Arrays of float64 that stand for an array."""
    dtype = np.dtype(x.dtype)
    if _parts(dtype) == 1:
        return [x.astype(np.float64)]
    low = x & np.array((1 << _LOW) - 1, dtype) if dtype.kind != "c" else x.imag
    high = x >> np.array(_LOW, dtype) if dtype.kind != "c" else x.real
    return [high.astype(np.float64), low.astype(np.float64)]


def _from_numbers(numbers: Sequence[Any], dtype: np.dtype) -> Any:
    """What :func:`_to_numbers` was given."""
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return jax.lax.complex(*(from_scalars(x, part) for x in numbers))
    if len(numbers) == 1:
        return from_scalars(numbers[0], dtype)
    high, low = (from_scalars(x, dtype) for x in numbers)
    return (high << np.array(_LOW, dtype)) | low


_INEXACT = ("float64", "float32", "complex128", "complex64")


def _array(name: str, x: Any) -> Any:
    check_plain(f"an argument of {name}", x)
    if not isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise TypeError(
            f"{name} takes arrays and numbers, got {type(x).__name__}; use functools.partial for anything else"
        )
    array = jnp.asarray(x)
    _check_type(f"an argument of {name}", array.dtype)
    return array


def _check_type(what: str, dtype: Any) -> None:
    known = jnp.issubdtype(dtype, np.integer) or dtype == np.bool_ or str(dtype) in _INEXACT
    if not known or str(dtype) in ("int2", "int4", "uint2", "uint4"):
        raise TypeError(
            f"compiled point functions know {', '.join(_INEXACT)}, integers and bool; {what} is {dtype}; convert it by "
            ".astype"
        )


# -- the public function ---------------------------------------------------------------------------------------------


def pointwise(function: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """A fast replacement of ``jax.jit(jax.vmap(function, in_axes))`` for a function of small arrays.

    The function is translated to C, in which a loop over the points is vectorised; its derivatives as well. It works
    under all transformations of JAX. It computes in the types that it is given; float64 is the fastest.

    Args:
        function: of pytrees of arrays, by position or keyword, returning a pytree of arrays: float64 and float32,
            complex numbers of those, integers, booleans.
        in_axes: as of `jax.vmap`: for each positional argument, or for parts of it, the axis that goes over the points,
            or None for what all points share. Keyword arguments have it in front.

    Returns:
        a function of arrays with one more axis, the points, that returns such arrays, with that axis in front.

    Raises:
        TypeError: an argument is no array or number, or of a type that has no translation, such as bfloat16; or JAX is
            without float64.
        ValueError: arguments with different numbers of points, or `in_axes` that do not fit.
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

    Materials by number, and parameters that all points share:

    >>> def stress(strain, material, params):
    ...     return params["E"][material] * strain
    >>> g = ct.pointwise(stress, in_axes=(0, 0, None))
    >>> print(g(jnp.ones(3), jnp.array([0, 1, 1]), {"E": jnp.array([1.0, 70.0])}))
    [ 1. 70. 70.]
    """
    name = str(getattr(function, "__name__", type(function).__name__))
    known: dict[Any, tuple[_Pointwise, Any]] = {}

    def compiled(treedef: Any, avals: Sequence[jax.ShapeDtypeStruct]) -> tuple[_Pointwise, Any]:
        key = exact(treedef), tuple((aval.shape, str(aval.dtype), aval.weak_type) for aval in avals)
        if key in known:
            return known[key]
        args, kwargs = jax.tree.unflatten(treedef, avals)
        with jax_compat.apart():
            closed, results = jax.make_jaxpr(function, return_shape=True)(*args, **kwargs)
        leaves, out_tree = jax.tree.flatten(results)
        for leaf in leaves:
            _check_type(f"a result of {name}", leaf.dtype)
        evaluate = jax_compat.jaxpr_function(closed)

        def flat(*numbers: Any) -> list[Any]:
            given = iter(numbers)
            values = [_from_numbers([next(given) for _ in range(_parts(a.dtype))], a.dtype) for a in avals]
            return [number for out in evaluate(*values) for number in _to_numbers(out)]

        point_function = PointFunction(name, _slots("x", avals), _slots("y", leaves), flat, np.dtype(np.float64))
        known[key] = _Pointwise(point_function), (out_tree, [np.dtype(leaf.dtype) for leaf in leaves])
        return known[key]

    @functools.wraps(function)
    def over_points(*args: Any, **kwargs: Any) -> Any:
        if not jax.config.read("jax_enable_x64"):
            raise TypeError(f"{name} is compiled for float64: jax.config.update('jax_enable_x64', True)")
        leaves, treedef = jax.tree.flatten((args, kwargs))
        axes = _axes(name, in_axes, args, kwargs)
        arrays = [_array(name, leaf) for leaf in leaves]
        moved = [x if d is None else _in_front(name, x, d) for x, d in zip(arrays, axes, strict=True)]
        counts = {x.shape[0] for x, d in zip(moved, axes, strict=True) if d is not None}
        if len(counts) != 1:
            shapes = ", ".join(
                str(x.shape) if d is None else f"{x.shape} along {d}" for x, d in zip(arrays, axes, strict=True)
            )
            raise ValueError(f"the arguments of {name} have one number of points, got the shapes {shapes}")
        avals = [
            jax.ShapeDtypeStruct(x.shape[d is not None :], np.dtype(x.dtype), weak_type=jax.typeof(x).weak_type)
            for x, d in zip(moved, axes, strict=True)
        ]
        application, (out_tree, dtypes) = compiled(treedef, avals)
        outs = iter(apply(application, *(number for x in moved for number in _to_numbers(x))))
        results = [_from_numbers([next(outs) for _ in range(_parts(t))], t) for t in dtypes]
        return jax.tree.unflatten(out_tree, results)

    return over_points


def _slots(prefix: str, avals: Sequence[Any]) -> tuple[Slot, ...]:
    shapes = [aval.shape for aval in avals for _ in range(_parts(np.dtype(aval.dtype)))]
    return tuple(
        Slot(f"{prefix}{i}", "quadrature", (Field(None, EvalMode.NONE, shape),), shape)
        for i, shape in enumerate(shapes)
    )


_SHARED = "shared"


def _axes(name: str, in_axes: Any, args: Any, kwargs: Any) -> list[int | None]:
    """The axis of the points for each leaf of the arguments; None: all points share it."""
    prefix = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    prefix = jax.tree.map(lambda axis: _SHARED if axis is None else axis, prefix, is_leaf=lambda axis: axis is None)
    try:
        axes = jax.tree.leaves(jax.tree.broadcast(prefix, args)) + [0] * len(jax.tree.leaves(kwargs))
    except ValueError as error:
        raise ValueError(f"in_axes={in_axes} does not fit the {len(args)} arguments of {name}: {error}") from None
    if not all(axis is _SHARED or (isinstance(axis, int) and not isinstance(axis, bool)) for axis in axes):
        raise TypeError(f"in_axes are integers and None, as for jax.vmap, got {in_axes!r}")
    return [None if axis is _SHARED else axis for axis in axes]


def _in_front(name: str, x: Any, axis: int) -> Any:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"the arguments of {name} have an axis {axis} over one number of points, got the shape {x.shape}; in_axes= "
            "says which axis it is, None is for what all points share"
        )
    return jnp.moveaxis(x, axis, 0)
