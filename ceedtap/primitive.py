"""The tap primitive and its rules; `id_tap` and `id_print`.

The primitive has no outputs and a JAX effect: that is what makes a tap exact in every transformation. Where the result
of the tap would be an output, JAX could drop, duplicate or save it together with the tap. `id_tap` returns its argument
itself.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.outfeed import OUTFEED, Consumer, Transforms
from ceedtap.protocol import ArraySpec, encode_header

# -- primitive -------------------------------------------------------------------------------------------------------

tap_p = jax_compat.Primitive("ceedtap")
tap_p.multiple_results = True


class TapEffect(jax_compat.Effect):
    """Keeps taps in a program whose results do not depend on them."""

    def __str__(self) -> str:
        return "Tap"

    def __eq__(self, other: object) -> bool:
        return type(other) is TapEffect

    def __hash__(self) -> int:
        return hash(TapEffect)


_effect = TapEffect()
jax_compat.allow_effect(TapEffect)

# -- public functions ------------------------------------------------------------------------------------------------

_MISSING = object()
_interned: weakref.WeakValueDictionary[Any, Consumer] = weakref.WeakValueDictionary()
_interned_lock = threading.Lock()


def _consumer(func: Callable[..., Any], treedef: Any, kwargs: dict[str, Any]) -> Consumer:
    """The consumer for these; the same object for the same ones, so that JAX finds programs with it in its caches."""
    key = (func, treedef, tuple(sorted(kwargs.items())))
    try:
        hash(key)
    except TypeError:  # an unhashable keyword argument: a consumer of its own
        return Consumer(func, treedef, kwargs)
    with _interned_lock:
        consumer = _interned.get(key)
        if consumer is None:
            consumer = _interned[key] = Consumer(func, treedef, kwargs)
    return consumer


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"id_tap taps arrays and numbers, got {type(leaf).__name__}; pass what the consumer needs besides them by "
            "keyword"
        ) from error


def id_tap(func: Callable[..., Any], *args: Any, result: Any = _MISSING, **kwargs: Any) -> Any:
    """Calls ``func(*args, **kwargs)`` on the host with the values that `args` have when the program runs.

    Args:
        func: called on the receiver thread with NumPy arrays in place of the leaves of `args`. What it returns is not
            used, what it raises is raised by :func:`ceedtap.barrier_wait` or at the end of
            :func:`ceedtap.outfeed_receiver`. When the program was transformed, it also gets ``transforms=``, a tuple of
            pairs (name, parameters), outermost last; for `jax.vmap`: ``("batch", {"batch_dims": (0, None)})``, one
            axis or None for each leaf.
        args: one or more pytrees of arrays.
        result: what to return in place of `args`.
        kwargs: passed on to `func`.

    Returns:
        `result` when given; else `args`, as it is when there is just one.

    >>> import ceedtap as ct, jax
    >>> def show(x, what):
    ...     print(what, x)
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda x: ct.id_tap(show, x * x, what="square:"))(3.0)
    square: 9.0
    """
    if not callable(func):
        raise TypeError(f"id_tap needs a function that gets the values, got {type(func).__name__}")
    if not args:
        raise TypeError("id_tap needs at least one value to tap: id_tap(func, x)")
    leaves, treedef = jax.tree.flatten(args)
    arrays = [_as_array(leaf) for leaf in leaves]
    encode_header(0, _specs(arrays))  # says here, at the user's line, what no frame can hold
    tap_p.bind(*arrays, consumer=_consumer(func, treedef, kwargs), transforms=())
    if result is not _MISSING:
        return result
    return args[0] if len(args) == 1 else args


_print_lock = threading.Lock()


def _print(*args: Any, what: Any, threshold: int | None, output_stream: TextIO | None, **kwargs: Any) -> None:
    labels = {"what": what, **kwargs}
    lines = [" ".join(f"{name}: {value}" for name, value in labels.items() if value is not None)]
    for arg in args:
        if isinstance(arg, np.ndarray):
            lines.append(np.array2string(arg, threshold=threshold))
        else:
            text = [np.array2string(leaf, threshold=threshold) for leaf in jax.tree.leaves(arg)]
            lines.append(str(jax.tree.unflatten(jax.tree.structure(arg), text)).replace("'", ""))
    with _print_lock:  # one write, so that lines of several printers do not mix
        stream = output_stream if output_stream is not None else sys.stdout
        stream.write("\n".join(line for line in lines if line) + "\n")
        stream.flush()


def id_print(
    x: Any,
    *,
    result: Any = _MISSING,
    what: str | None = None,
    threshold: int | None = None,
    output_stream: TextIO | None = None,
    **kwargs: Any,
) -> Any:
    """Prints a pytree of arrays when the program runs, and returns it.

    Args:
        x: the pytree.
        result: what to return in place of `x`.
        what: a label.
        threshold: number of elements from which an array is abbreviated (as in `numpy.array2string`).
        output_stream: where to print; None is `sys.stdout` at the time of printing.
        kwargs: more labels.

    >>> import ceedtap as ct, jax, jax.numpy as jnp
    >>> with ct.outfeed_receiver():
    ...     _ = jax.jit(lambda x: ct.id_print(x + 1, what="x + 1"))(jnp.arange(3))
    what: x + 1
    [1 2 3]
    """
    return id_tap(_print, x, result=x if result is _MISSING else result, what=what, threshold=threshold,
                  output_stream=output_stream, **kwargs)  # fmt: skip


# -- lowering and evaluation -----------------------------------------------------------------------------------------


def _specs(avals: Any) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec(tuple(int(d) for d in aval.shape), np.dtype(aval.dtype)) for aval in avals)


_lower = jax_compat.lower_ffi("ceedtap_tap", has_side_effect=True)


def _lowering(ctx: jax_compat.LoweringRuleContext, *operands: Any, consumer: Consumer, transforms: Any) -> Any:
    reference = OUTFEED.route(consumer, _thaw(transforms), _specs(ctx.avals_in))
    # The route must live until XLA has instantiated the call; from then on the executable holds it.
    jax_compat.add_keepalive(ctx, reference)
    return _lower(ctx, *operands, header=np.frombuffer(reference.route.header, np.uint32)).results


jax_compat.register_lowering(tap_p, _lowering, platform="cpu")


@tap_p.def_impl
def _impl(*args: Any, consumer: Consumer, transforms: Any) -> list[Any]:
    """Outside of compiled code an event goes straight to the queue: nothing to compile, nothing to cache."""
    arrays = [np.asarray(arg) for arg in args]
    OUTFEED.emit(OUTFEED.route(consumer, _thaw(transforms), _specs(arrays)), arrays)
    return []


# -- abstract evaluation ---------------------------------------------------------------------------------------------


@tap_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, consumer: Consumer, transforms: Any) -> tuple[list[Any], set[Any]]:
    return [], {_effect}


# -- batching --------------------------------------------------------------------------------------------------------


def _thaw(transforms: Any) -> Transforms:
    """Parameters of a primitive must be hashable, so the dicts of `transforms` travel as tuples of pairs."""
    return tuple((name, dict(params)) for name, params in transforms)


def _batching(args: Any, dims: Any, *, consumer: Consumer, transforms: Any) -> tuple[list[Any], list[Any]]:
    """One event with the batched arrays, however long the batch is."""
    mark = ("batch", (("batch_dims", tuple(dims)),))
    tap_p.bind(*args, consumer=consumer, transforms=(*transforms, mark))
    return [], []


jax_compat.primitive_batchers[tap_p] = _batching

# -- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    tap_p.bind(*primals, **params)
    return [], []


jax_compat.primitive_jvps[tap_p] = _jvp
