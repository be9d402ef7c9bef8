"""Rules of :mod:`ceedtap.codegen` for primitives of other libraries, such as equinox and lineax, and of the user's own.

A primitive that JAX does not know by name is what its implementation does, if that is written in JAX: solvers of linear
systems, reductions over what `vmap` adds, guards against batching. Nothing is imported for that.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ceedtap import jax_compat
from ceedtap.codegen import Builder, Elements, TranslationError, elements, rule, translate


@rule("")
def _implemented(builder: Builder, eqn: Any, *operands: Elements, **params: Any) -> list[Elements]:
    primitive = eqn.primitive
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def function(*values: Any) -> list[Any]:
        results = primitive.impl(*values, **params)
        return list(results) if primitive.multiple_results else [results]

    try:
        with jax_compat.concrete():
            closed = jax.make_jaxpr(function)(*avals)
    except Exception as error:
        raise TranslationError(
            f"has no translation to C, and what it does ({type(error).__name__}: {error}) is not written in JAX"
        ) from error
    if jax_compat.contains(closed, {primitive}):
        raise TranslationError("has no translation to C")
    return translate(builder, closed.jaxpr, closed.consts, operands)


@rule("pure_callback")
def _pure_callback(builder: Builder, eqn: Any, *operands: Elements, callback: Any, **_: Any) -> list[Elements]:
    """The errors of `equinox.error_if`: no function of a point can raise them, so its results are nan."""
    function = getattr(callback, "callback_func", callback)
    if getattr(function, "__module__", "") != "equinox._errors":
        raise TranslationError(
            "has no translation to C: it calls Python on the host; call it outside of the point function, and pass "
            "in what it returns as a field"
        )
    out = []
    for v in eqn.outvars:
        dtype = np.dtype(v.aval.dtype)
        nothing: Any = np.nan if dtype.kind in "fc" else 0
        out.append(elements(np.full(v.aval.shape, nothing), dtype))
    return out
