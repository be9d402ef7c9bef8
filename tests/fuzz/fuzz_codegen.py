"""Random point functions: translated to C, and evaluated by JAX.

Many functions go into one translation unit, so that thousands take minutes::

    python tests/fuzz/fuzz_codegen.py --functions 10000
    python tests/fuzz/fuzz_codegen.py --exact --functions 10000

`--exact`: of operations whose every bit JAX defines, with branches on exact comparisons, on special values: the same
bits, branches and places of nan as JAX has that evaluates one operation after the other.

`tests/test_codegen_fuzz.py` runs a fixed sample of both.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from codegen_helpers import eager, load, source_of, standalone

POINTS = 9
SHAPES = [(), (3,), (2, 2), (3, 3), (4,)]

# Of smooth functions only: a jump would tell of the last digit of its argument.
UNARY: list[Callable[[Any], Any]] = [
    jnp.sin, jnp.cos, jnp.tanh, jnp.arctan, jnp.negative, jnp.abs, lax.erf, jnp.arcsinh, jax.nn.sigmoid, jnp.cbrt,
    lambda x: jnp.exp(-x * x), lambda x: jnp.log1p(x * x), lambda x: jnp.sqrt(1 + x * x), lambda x: 1 / (1 + x * x),
    lambda x: x**2, lambda x: x**3 / (1 + x**4), lambda x: lax.rsqrt(1 + x * x), lambda x: jnp.expm1(jnp.tanh(x)),
    lambda x: (1 + x * x) ** 0.3, lambda x: jnp.cosh(jnp.sin(x)), lambda x: jax.nn.softplus(x), lambda x: 0.5 * x,
    lambda x: jnp.arccosh(1.5 + x * x), lambda x: jnp.arcsin(0.9 * jnp.tanh(x)), lambda x: lax.lgamma(1.5 + x * x),
    lambda x: lax.digamma(2.0 + x * x), lambda x: lax.erf_inv(0.9 * jnp.sin(x)), lambda x: lax.bessel_i0e(x),
    lambda x: x.astype(jnp.float64) - 1, lambda x: jnp.clip(x, -0.5, 0.5), jax.nn.relu, jnp.square,
]  # fmt: skip
BINARY: list[Callable[[Any, Any], Any]] = [
    jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lambda x, y: x / (1 + y * y), jnp.hypot,
    lambda x, y: jnp.arctan2(x, 1 + y * y), lambda x, y: jnp.where(x > y, x, y * 2 - x), jnp.logaddexp,
    lambda x, y: (1 + x * x) ** jnp.tanh(y), lambda x, y: lax.select(x < y, x + y, 2 * y),
    lambda x, y: lax.complex(x, y).real * 2, lambda x, y: jnp.abs(lax.complex(x, 1.0 + y * y) ** 2),
]  # fmt: skip
SHAPED: list[Callable[[Any], Any]] = [
    lambda x: x.T, jnp.ravel, jnp.flip, lambda x: jnp.roll(x, 1), jnp.sum, lambda x: jnp.sum(x, axis=-1), jnp.mean,
    jnp.max, lambda x: jnp.min(x, axis=0), jnp.cumsum, lambda x: jnp.sort(x, axis=-1), lambda x: x[..., ::-1],
    lambda x: jnp.concatenate([x, -x], axis=0), lambda x: x[1:], lambda x: x[:, 0] if x.ndim > 1 else x[0],
    lambda x: jnp.stack([x, x * 2]).sum(0), lambda x: jnp.pad(x, 1)[1:], lambda x: jnp.outer(x, x)[:2, :3],
    lambda x: jnp.linalg.norm(x + 3.0), lambda x: jax.nn.softmax(x, axis=-1), jnp.prod, lambda x: x.at[0].set(x[-1]),
    lambda x: x.at[-1].add(x[0]), lambda x: jnp.einsum("...i,...i->...", x, x), lambda x: lax.cummax(x, axis=0),
    lambda x: x[jnp.argmax(jnp.ravel(x)) % x.shape[0]], lambda x: jnp.take(x, jnp.array([1, 0]), axis=0),
]  # fmt: skip
SQUARE: list[Callable[[Any], Any]] = [
    lambda a: jnp.linalg.inv(a + 5 * jnp.eye(len(a))), jnp.linalg.det, jnp.trace, lambda a: a @ a.T,
    lambda a: jnp.linalg.cholesky(a @ a.T + jnp.eye(len(a))), lambda a: jnp.linalg.eigvalsh(a + a.T),
    lambda a: jnp.linalg.solve(a + 5 * jnp.eye(len(a)), a[0]), jnp.tril, jnp.diag, lambda a: a - a.T,
    lambda a: jnp.linalg.svd(a, compute_uv=False), lambda a: jnp.linalg.slogdet(a + 5 * jnp.eye(len(a)))[1],
    lambda a: jnp.linalg.matrix_power(jnp.tanh(a), 3),
]  # fmt: skip


def _loop(rng: np.random.Generator) -> Callable[[Any], Any]:
    turns, factor = int(rng.choice([2, 3, 200])), float(rng.uniform(0.2, 0.9))
    return [
        lambda x: lax.fori_loop(0, turns, lambda i, c: jnp.sin(c) * factor + x, x),
        lambda x: lax.scan(lambda c, a: (c * factor + jnp.tanh(x) * a, None), x, jnp.linspace(0, 1, turns))[0],
        lambda x: lax.while_loop(lambda c: c[1] < turns, lambda c: (c[0] * factor + x, c[1] + 1), (x, 0))[0],
        lambda x: lax.cond(jnp.sum(x) > 0.3, lambda y: jnp.cos(y), lambda y: y * factor, x),
        lambda x: lax.switch(turns % 3, [jnp.sin, jnp.cos, jnp.tanh], x),
        jax.checkpoint(lambda x: jnp.sin(x) * factor),
    ][rng.integers(6)]


def random_function(seed: int) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """A function and the shapes of its arguments: a random program, or a derivative of one."""
    rng = np.random.default_rng(seed)
    shapes = [SHAPES[i] for i in rng.integers(0, len(SHAPES), rng.integers(1, 4))]
    length = int(rng.integers(2, 9))
    derivative = int(rng.integers(5))

    def program(*args: Any) -> Any:
        draw = np.random.default_rng(seed + 1)
        values = list(args)
        for _ in range(length):
            x = values[int(draw.integers(len(values)))]
            y = values[int(draw.integers(len(values)))]
            kind = draw.integers(10)
            if kind < 3:
                result = UNARY[draw.integers(len(UNARY))](x)
            elif kind < 6:
                same = x.shape == y.shape or () in (x.shape, y.shape)
                x, y = jnp.broadcast_arrays(x, y if same else jnp.sum(y))
                result = BINARY[draw.integers(len(BINARY))](x, y)
            elif kind < 7 or (kind == 8 and x.ndim != 2):
                result = _loop(draw)(x)
            elif kind == 8 and x.shape[0] == x.shape[1]:
                result = SQUARE[draw.integers(len(SQUARE))](x)
            else:
                result = SHAPED[draw.integers(len(SHAPED))](x) if x.ndim and min(x.shape) > 1 else jnp.stack([x, -x])
            if result.size <= 40:
                values.append(result)
        return values[-1], values[-2]

    def total(*args: Any) -> Any:
        return sum(jnp.sum(jnp.sin(v)) for v in program(*args))

    if derivative == 1:
        return lambda *args: jax.jvp(total, args, tuple(jnp.cos(a) for a in args))[1], shapes
    if derivative == 2:
        return jax.grad(total, tuple(range(len(shapes)))) if _reversible(total, shapes) else program, shapes
    return program, shapes


def _reversible(function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> bool:
    """Loops of unknown length have no reverse derivative."""
    try:
        jax.eval_shape(
            jax.grad(function, tuple(range(len(shapes)))), *[jax.ShapeDtypeStruct(s, np.float64) for s in shapes]
        )
    except ValueError:
        return False
    return True


def run(seeds: list[int], rtol: float = 1e-9) -> list[str]:
    """Compares all; what differs, one line each."""
    programs = [random_function(seed) for seed in seeds]
    sources, failed = [], []
    for seed, (function, shapes) in zip(seeds, programs, strict=True):
        sources.append(source_of(function, *shapes, name=f"f{seed}"))
    library = load('#pragma GCC optimize("O1")\n' + standalone(*sources))
    for seed, (function, shapes) in zip(seeds, programs, strict=True):
        rng = np.random.default_rng(seed)
        args = [rng.standard_normal((POINTS, *s)) for s in shapes]
        want = reference(function, args)
        got = [np.full((int(np.prod(w.shape[1:])), POINTS), 12345.0) for w in want]
        ins = [np.ascontiguousarray(a.reshape(POINTS, -1).T) for a in args]
        pointers = [(ctypes.c_void_p * len(xs))(*[x.ctypes.data for x in xs]) for xs in (ins, got)]
        getattr(library, f"f{seed}")(None, POINTS, *pointers)
        got = [g.T.reshape(w.shape) for g, w in zip(got, want, strict=True)]
        # Without optimisation XLA is wrong now and then, where the same operations one by one are right.
        if difference(got, want, rtol) and (found := difference(got, want := reference(function, args, "2"), rtol)):
            others = [[shift(a) for a in args] for shift in SHIFTS]
            if not ill_conditioned(got, want, [reference(function, other, "2") for other in others]):
                failed.append(f"seed {seed}: {found}")
    return failed


#: Ways to change the last bits of the inputs; a single one may change a result by chance not at all.
SHIFTS = (lambda a: np.nextafter(a, np.inf), lambda a: np.nextafter(a, -np.inf), lambda a: a * (1 + 4e-16))


def ill_conditioned(got: list[np.ndarray], want: list[np.ndarray], shifted: list[list[np.ndarray]]) -> bool:
    """Whether what differs is lost in rounding anyway, as the cosine of a huge number is: the last bit of the inputs
    changes it as much."""
    for g, w, *others in zip(got, want, *shifted, strict=True):
        if not np.array_equal(np.isnan(g), np.isnan(w)):
            return False
        finite = np.isfinite(w)
        scale = np.max(np.abs(w[finite]), initial=1.0)
        change = np.max([np.abs(other - w)[finite] for other in others], axis=0)
        if not np.all(np.abs(g - w)[finite] <= np.maximum(100 * change, 1e-9 * scale)):
            return False
    return True


def reference(function: Callable[..., Any], args: list[np.ndarray], level: str | None = None) -> list[np.ndarray]:
    options = {"xla_backend_optimization_level": level} if level else None
    out = jax.jit(jax.vmap(function), compiler_options=options)(*args)
    return [np.asarray(w, np.float64) for w in jax.tree.leaves(out)]


def difference(got: list[np.ndarray], want: list[np.ndarray], rtol: float) -> str:
    """What differs, or nothing."""
    for g, w in zip(got, want, strict=True):
        if not np.array_equal(np.isnan(g), np.isnan(w)):
            return "nan at other places"
        scale = np.max(np.abs(w[np.isfinite(w)]), initial=1.0)
        error = np.max(np.abs(g - w)[np.isfinite(w)], initial=0.0) / scale
        if not error <= rtol:
            return f"relative error {error:.2e}"
    return ""


# -- exact -------------------------------------------------------------------------------------------------------------

TINY = np.finfo(np.float64).tiny
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-310, -1e-310, 1e308, -1e308, 1e-200, 1e200, np.inf, -np.inf, np.nan, 49.0, 0.1, 3.0]

EXACT_UNARY: list[Callable[[Any], Any]] = [
    jnp.negative, jnp.abs, jnp.sqrt, jnp.floor, jnp.ceil, lax.round, jnp.sign, jnp.square, jnp.isfinite, jnp.signbit,
    lambda x: x**2, lambda x: x**3, lambda x: x**-1, lambda x: x**-2, lambda x: x**-3, lambda x: x**5, jax.nn.relu,
    lambda x: x + 0.0, lambda x: x - 0.0, lambda x: 0.0 - x, lambda x: x * 0.0, lambda x: x * 1.0,
    lambda x: lax.div(x, lax.abs(x) + 49.0),
    lambda x: 1.0 / x, lambda x: x * 0.1, lambda x: x + 0.1, lambda x: jnp.clip(x, -0.5, 2.0),
    lambda x: jnp.arctan2(x, -1) > 0,
    lambda x: jnp.where(x == 0, 1.0 / x, x), lambda x: jnp.where(jnp.isnan(x), 7.0, x),
    lambda x: x.astype(jnp.int32) * 0.5,
    lambda x: jnp.maximum(x, 0.0), lambda x: jnp.minimum(0.0, x), lambda x: jnp.float64(jnp.float32(x)), jnp.trunc,
]  # fmt: skip
EXACT_BINARY: list[Callable[[Any, Any], Any]] = [
    jnp.add, jnp.subtract, jnp.multiply, lax.div, jnp.maximum, jnp.minimum, jnp.copysign, lax.rem,
    lambda x, y: x * x - y * y, lambda x, y: x * y - y * x, lambda x, y: lax.floor(lax.div(x, y)),
    lambda x, y: jnp.where(lax.div(x, y) >= 1.0, x, 2 * y), lambda x, y: jnp.where(x * y == y * x, lax.div(x, y), x),
    lambda x, y: jnp.where(x > y, x, y), lambda x, y: jnp.where(x == y, 1.0, x - y),
    lambda x, y: lax.select(x <= y, x, y),
    lambda x, y: lax.div(x + y, y) + lax.div(x - y, y), lambda x, y: jnp.where((x + y) - y == x, 1.0, -1.0),
    lambda x, y: jnp.sqrt(x * x - y * y),
    lambda x, y: lax.cond(jnp.all(x >= y), lambda a, b: a - b, lambda a, b: b * a, x, y),
    lambda x, y: jax.jvp(lax.div, (x, y), (y, x))[1], lambda x, y: jax.jvp(lax.mul, (x, y), (y, x))[1],
]  # fmt: skip
EXACT_SHAPED: list[Callable[[Any], Any]] = [
    lambda x: jnp.sum(x, axis=-1), lambda x: jnp.max(x, axis=0), lambda x: jnp.min(x, axis=-1),
    lambda x: jnp.sort(x, axis=-1),
    lambda x: x[..., ::-1], lambda x: x[1:], lambda x: lax.top_k(x, 2)[0], lambda x: jnp.argmax(x, axis=-1) * 1.0,
    lambda x: lax.cummax(x, axis=0), lambda x: x.at[0].add(x[-1]), lambda x: jnp.concatenate([x, -x], axis=0),
    lambda x: jnp.stack([x[0], x[1]]), lambda x: jax.grad(lambda a: jnp.sum(a[0] * a[1]))(x),
]  # fmt: skip


def exact_function(seed: int) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """A random program of operations of which IEEE arithmetic defines every bit."""
    rng = np.random.default_rng(seed)
    shapes = [SHAPES[i] for i in rng.integers(0, len(SHAPES), rng.integers(1, 4))]
    length = int(rng.integers(2, 8))

    def program(*args: Any) -> Any:
        draw = np.random.default_rng(seed + 1)
        values = list(args)
        for _ in range(length):
            x, y = (values[int(draw.integers(len(values)))] for _ in "xy")
            kind = draw.integers(5)
            if kind < 2:
                result = EXACT_UNARY[draw.integers(len(EXACT_UNARY))](x)
            elif kind < 4:
                # XLA makes x / broadcast(y) a product with a reciprocal; equal shapes it leaves alone.
                y = y if x.shape == y.shape else x[::-1] if x.ndim else x
                result = EXACT_BINARY[draw.integers(len(EXACT_BINARY))](x, y)
            else:
                result = EXACT_SHAPED[draw.integers(len(EXACT_SHAPED))](x) if x.ndim and min(x.shape) > 1 else x
            if result.size <= 40:
                values.append(jnp.asarray(result, jnp.float64))
        return values[-1], values[-2]

    return program, shapes


def run_exact(seeds: list[int]) -> list[str]:
    """Compares all with JAX that evaluates one primitive after the other; what differs, one line each."""
    programs = [exact_function(seed) for seed in seeds]
    sources = [source_of(f, *shapes, name=f"f{seed}") for seed, (f, shapes) in zip(seeds, programs, strict=True)]
    library = load('#pragma GCC optimize("O1")\n' + standalone(*sources))
    failed = []
    for seed, (function, shapes) in zip(seeds, programs, strict=True):
        rng = np.random.default_rng(seed)
        args = [special_numbers(rng, (POINTS, *shape)) for shape in shapes]
        want = eager(function, *args)
        got = [np.full((int(np.prod(w.shape[1:])), POINTS), 12345.0) for w in want]
        ins = [np.ascontiguousarray(a.reshape(POINTS, -1).T) for a in args]
        pointers = [(ctypes.c_void_p * len(xs))(*[x.ctypes.data for x in xs]) for xs in (ins, got)]
        library.flushed(getattr(library, f"f{seed}"), POINTS, *pointers)
        for g, w in zip([g.T.reshape(w.shape) for g, w in zip(got, want, strict=True)], want, strict=True):
            same = (np.isnan(g) & np.isnan(w)) | (flushed_bits(g) == flushed_bits(w))
            if not same.all():
                point = int(np.argwhere(~same)[0][0])
                inputs = [a[point].tolist() for a in args]
                failed.append(f"seed {seed}: {g[point].tolist()} instead of {w[point].tolist()} for {inputs}")
                break
    return failed


def flushed_bits(x: np.ndarray) -> np.ndarray:
    """What only moves a number keeps it, in C and in XLA now and then."""
    return np.where(np.abs(x) < TINY, np.copysign(0.0, x), x).view(np.int64)


def special_numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Special values, numbers of every last digit, and among all of them equal ones."""
    x = np.where(rng.random(shape) < 0.4, rng.choice(SPECIAL, shape), rng.standard_normal(shape))
    return np.where(rng.random(shape) < 0.3, x.reshape(-1)[rng.integers(x.size)], x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--exact", action="store_true", help="operations whose every bit is defined")
    options = parser.parse_args()
    # Compiling is most of the time, and the programs are small.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    failed: list[str] = []
    end = options.start + options.functions
    for start in range(options.start, end, options.batch):
        found = (run_exact if options.exact else run)(list(range(start, min(start + options.batch, end))))
        failed += found
        print(*found, f"{start + options.batch - options.start} functions, {len(failed)} differ", sep="\n", flush=True)
        if not options.exact:  # primitives one by one are the same ones again
            jax.clear_caches()
    sys.exit(bool(failed))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
