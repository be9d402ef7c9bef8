"""Runs translated functions on batches of points, next to `jax.vmap` of the same functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ceedtap import ceed_ffi
from ceedtap.codegen_qfunction import Argument, qfunction
from ceedtap.toolchain import compile_shared

# Without libCEED's headers: what a generated file needs of them on a CPU.
_HEADER = """\
#include <stdint.h>
typedef int32_t CeedInt;
typedef double CeedScalar;
#define CEED_QFUNCTION(name) int name
#define CEED_QFUNCTION_HELPER static inline
#define CeedPragmaSIMD _Pragma("GCC ivdep")
"""

# As XLA's threads are: numbers below the normal ones are zeros.
_FLUSHED = """
int flushed(int (*function)(void *, const CeedInt, const CeedScalar *const *, CeedScalar *const *), CeedInt Q,
            const CeedScalar *const *in, CeedScalar *const *out) {
#ifdef __SSE2__
  const unsigned mode = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(mode | 0x8040);
#endif
  const int result = function(0, Q, in, out);
#ifdef __SSE2__
  __builtin_ia32_ldmxcsr(mode);
#endif
  return result;
}
"""


def source_of(function: Callable[..., Any], *shapes: Sequence[int], name: str = "f", precise: bool = False) -> str:
    """The C source of a function whose arguments have these shapes."""
    closed = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(tuple(s), np.float64) for s in shapes])
    inputs = [Argument(f"u{i}") for i in range(len(closed.jaxpr.invars))]
    outputs = [f"v{i}" for i in range(len(closed.jaxpr.outvars))]
    return qfunction(name, closed, inputs, outputs, precise=precise)


def standalone(*sources: str) -> str:
    """One translation unit without libCEED's headers."""
    return (
        _HEADER
        + _FLUSHED
        + "".join(s.replace("#pragma once\n", "").replace("#include <ceed/types.h>\n", "") for s in sources)
    )


@dataclass
class Compiled:
    """A translated function; call it with arrays whose first axis is the points."""

    function: Any
    avals: Sequence[Any]
    source: str
    library: Any = None

    def __call__(self, *args: Any, flush: bool = False) -> list[np.ndarray]:
        """The results; `flush`: with denormal numbers as zeros, as in XLA."""
        call, outs = self.prepare(*args, flush=flush)
        call()
        num = len(np.asarray(args[0]))
        return [o.T.reshape(num, *a.shape) for o, a in zip(outs, self.avals, strict=True)]

    def prepare(self, *args: Any, flush: bool = False) -> tuple[Callable[[], None], list[np.ndarray]]:
        """The bare call, for timing, and where its results come."""
        num = len(np.asarray(args[0]))
        ins = [np.ascontiguousarray(np.asarray(a, np.float64).reshape(num, -1).T) for a in args]
        outs = [np.full((int(np.prod(a.shape)), num), 12345.0) for a in self.avals]
        pointers = [(ctypes.c_void_p * max(len(xs), 1))(*[x.ctypes.data for x in xs]) for xs in (ins, outs)]

        def call(keep: Any = (ins, outs)) -> None:
            if flush:
                self.library.flushed(self.function, ctypes.c_int(num), *pointers)
            else:
                self.function(None, ctypes.c_int(num), *pointers)

        return call, outs


def load(unit: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_shared(unit)))


def compiled(function: Callable[..., Any], *shapes: Sequence[int], precise: bool = False) -> Compiled:
    """Translates and compiles a function."""
    source = source_of(function, *shapes, precise=precise)
    out = jax.eval_shape(function, *[jax.ShapeDtypeStruct(tuple(s), np.float64) for s in shapes])
    library = load(standalone(source))
    return Compiled(library.f, jax.tree.leaves(out), source, library)


def eager(function: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """What JAX computes for every point, one primitive after the other; nothing is fused and nothing simplified."""
    with jax.disable_jit():
        results = jax.tree.leaves(jax.vmap(function)(*args))
    return [np.asarray(r, np.float64) for r in results]


def check(
    function: Callable[..., Any], *args: Any, rtol: float = 1e-13, atol: float = 0.0, precise: bool = False
) -> Compiled:
    """Translated and evaluated by JAX, a function gives the same for every point.

    `rtol` is relative to the largest number in an output; where nan and infinities are must agree exactly.
    """
    args = tuple(np.asarray(a, np.float64) for a in args)
    run = compiled(function, *[a.shape[1:] for a in args], precise=precise)
    expected = jax.tree.leaves(jax.vmap(function)(*args))
    for got, want in zip(run(*args), expected, strict=True):
        compare(got, np.asarray(want, np.float64), rtol, atol)
    return run


def compare(got: np.ndarray, want: np.ndarray, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite])
    finite = np.isfinite(want)
    scale = np.max(np.abs(want[finite]), initial=0.0)
    np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=rtol * scale + atol)


def include_dir() -> str | None:
    """libCEED's headers, with those that its GPU backends compile QFunctions with."""
    return ceed_ffi.load().include_dir
