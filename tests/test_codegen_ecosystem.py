"""Solvers of other libraries inside of point functions, and primitives of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check, compiled
from jax.extend.core import Primitive
from jax.interpreters import batching

import ceedtap as ct
from ceedtap.codegen import TranslationError

eqx = pytest.importorskip("equinox")
lx = pytest.importorskip("lineax")
optx = pytest.importorskip("optimistix")

X = 0.5 + np.random.default_rng(0).random((9, 3))


def matrix(x):
    return jnp.outer(x, x) + jnp.diag(1 + x) + 0.1 * jnp.array([[0.0, 1, 2], [0, 0, 1], [1, 0, 0]])


def spd(x):
    return jnp.outer(x, x) + jnp.eye(3)


def linear(solver, make=matrix, tags=()):
    return lambda x: lx.linear_solve(lx.MatrixLinearOperator(make(x), tags), x**2, solver).value


def root(solver, **options):
    def function(x):
        return optx.root_find(lambda y, a: y**3 + y - a.sum(), solver, jnp.float64(1.0), x, **options).value

    return function


def system(solver):
    def function(x):
        return optx.root_find(lambda y, a: y + 0.1 * y**3 - a, solver, x, x).value

    return function


DIFFERENTIABLE = {
    "LU": linear(lx.LU()),
    "QR": linear(lx.QR()),
    "Cholesky": linear(lx.Cholesky(), spd, lx.positive_semidefinite_tag),
    "automatic": linear(lx.AutoLinearSolver(well_posed=True)),
    "Newton": root(optx.Newton(1e-12, 1e-12)),
    "bisection": root(optx.Bisection(1e-12, 1e-12), options={"lower": 0.0, "upper": 10.0}),
    "Newton's for systems": system(optx.Newton(1e-12, 1e-12)),
    "chord": system(optx.Chord(1e-12, 1e-12)),
    "error_if": lambda x: eqx.error_if(jnp.sin(x), (x < 0).any(), "negative") * x,
    "filter_custom_jvp": lambda x: custom(x) * 2,
    "fixed point": lambda x: optx.fixed_point(
        lambda y, a: jnp.cos(y) * a[0] * 0.5, optx.FixedPointIteration(1e-13, 1e-13), jnp.float64(0.5), x
    ).value,
}  # fmt: skip


@eqx.filter_custom_jvp
def custom(x):
    return jnp.sin(x)


@custom.def_jvp
def _custom_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.sin(x), 3 * jnp.cos(x) * t


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_with_and_without_derivatives(name):
    function = DIFFERENTIABLE[name]
    check(function, X, rtol=1e-12)
    check(lambda x, dx: jax.jvp(function, (x,), (dx,))[1], X, X[::-1], rtol=1e-10)
    out = jax.eval_shape(function, X[0])
    g = np.random.default_rng(1).random((9, *out.shape))
    check(lambda x, g: jax.vjp(function, x)[1](g)[0], X, g, rtol=1e-10)


def test_an_error_at_a_point_is_nan_there():
    """No function of a point can raise; nan is what equinox itself has for programs that must go on."""
    checked = ct.pointwise(lambda x: eqx.error_if(x, x > 2.0, "too large"))
    got = checked(jnp.array([1.0, 3.0, 2.0]))
    np.testing.assert_array_equal(got, [1.0, np.nan, 2.0])


def test_primitives_of_the_users_own():
    twice = Primitive("twice_of_mine")
    twice.def_impl(lambda x, factor: factor * x)
    twice.def_abstract_eval(lambda x, factor: jax.core.ShapedArray(x.shape, x.dtype))
    batching.primitive_batchers[twice] = lambda args, dims, factor: (twice.bind(*args, factor=factor), dims[0])
    check(lambda x: twice.bind(x, factor=2.0) + 1, X)
    host = Primitive("host_of_mine")
    host.def_impl(lambda x: np.asarray(x) * 2)
    host.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    with pytest.raises(TranslationError, match="`host_of_mine` has no translation to C, and what it does"):
        compiled(lambda x: host.bind(x), (3,))


def test_other_callbacks_are_refused():
    def law(x):
        return jax.pure_callback(np.sin, x, x)

    with pytest.raises(TranslationError, match="pass in what it returns as a field"):
        compiled(law, (3,))


def test_refusals_name_the_users_line_and_not_one_of_a_library():
    def law(x):
        return eqx.filter_pure_callback(np.sin, x, result_shape_dtypes=x)

    with pytest.raises(TranslationError, match=r"at .*test_codegen_ecosystem.py:\d+ \(.*law\)"):
        compiled(law, (3,))
