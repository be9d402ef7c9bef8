"""libCEED operators as JAX functions."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS

import ceedtap as ct
from ceedtap import apply
from ceedtap.native import lib

# A nonsymmetric operator: v = w * (a u + b . grad u), tested with the values of the test function only.
ADVECTION = """
CEED_QFUNCTION(advection)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *u = in[0], *grad = in[1], *w = in[2];
  for (CeedInt i = 0; i < Q; i++) out[0][i] = w[i] * (0.5 * u[i] + 2.0 * grad[i]);
  return 0;
}
CEED_QFUNCTION(advection_transpose)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar *v = in[0], *w = in[1];
  for (CeedInt i = 0; i < Q; i++) {
    out[0][i] = w[i] * 0.5 * v[i];
    out[1][i] = w[i] * 2.0 * v[i];
  }
  return 0;
}
CEED_QFUNCTION(square)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) out[0][i] = in[1][i] * in[0][i] * in[0][i];
  return 0;
}
CEED_QFUNCTION(failing)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) {
    out[0][i] = in[0][i];
    if (in[0][i] > 1e3) return 5;
  }
  return 0;
}
"""


class Line:
    """Elements of degree 3 on the interval [0, 1]; the number of elements is no multiple of the blocks' size."""

    def __init__(self, resource="/cpu/self", num_elem=11):
        self.ceed = ceed = ct.Ceed(resource)
        offsets = 3 * np.arange(num_elem)[:, None] + np.arange(4)
        self.n = 3 * num_elem + 1
        self.restriction = ceed.ElemRestriction(num_elem, 4, 1, 1, self.n, offsets)
        self.basis = ceed.BasisTensorH1Lagrange(1, 1, 4, 5, ct.GAUSS)
        self.points = ceed.StridedElemRestriction(num_elem, 5, 1, 5 * num_elem, [1, 5, 5])
        self.weights = ceed.Vector(5 * num_elem)
        self.num_elem = num_elem
        self.basis.apply(num_elem, ct.EVAL_WEIGHT, ct.VECTOR_NONE, self.weights)
        with self.weights.array_write() as values:
            values[:] = np.tile(np.polynomial.legendre.leggauss(5)[1], num_elem) / (2 * num_elem)

    def mass(self):
        op = self.ceed.Operator(self.ceed.QFunctionByName("MassApply"))
        op.set_field("u", self.restriction, self.basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", self.points, ct.BASIS_NONE, self.weights)
        op.set_field("v", self.restriction, self.basis, ct.VECTOR_ACTIVE)
        return op

    def from_source(self, name, inputs, outputs):
        qf = ct.QFunction.from_source(self.ceed, ADVECTION, name, inputs=inputs, outputs=outputs)
        op = self.ceed.Operator(qf)
        for field, _, mode in [*inputs, *outputs]:
            if field == "w":
                op.set_field("w", self.points, ct.BASIS_NONE, self.weights)
            elif mode == ct.EVAL_NONE:
                op.set_field(field, self.points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
            else:
                op.set_field(field, self.restriction, self.basis, ct.VECTOR_ACTIVE)
        return op

    def advection(self):
        value, grad, none = ct.EVAL_INTERP, ct.EVAL_GRAD, ct.EVAL_NONE
        forward = self.from_source("advection", [("u", 1, value), ("du", 1, grad), ("w", 1, none)], [("v", 1, value)])
        inputs, outputs = [("v", 1, value), ("w", 1, none)], [("u", 1, value), ("du", 1, grad)]
        return forward, self.from_source("advection_transpose", inputs, outputs)


def bare(op, u):
    """The operator applied without JAX."""
    ceed = op.ceed
    a, b = ceed.Vector(op.active_lengths[0]), ceed.Vector(op.active_lengths[1])
    a.set_array(np.array(u))
    op.apply(a, b)
    with b.array_read() as values:
        return np.array(values)


def dense(op):
    return np.stack([bare(op, e) for e in np.eye(op.active_lengths[0])], axis=1)


@pytest.fixture(scope="module")
def line():
    return Line()


@pytest.fixture(scope="module")
def u(line):
    return jnp.asarray(np.random.default_rng(0).standard_normal(line.n))


@pytest.mark.parametrize("resource", BACKENDS)
def test_equals_the_bare_operator_to_the_last_bit(resource, u):
    line = Line(resource)
    op = line.mass()
    f = ct.embed(op)
    expected = bare(op, u)
    assert np.array_equal(f(u), expected)
    assert np.array_equal(jax.jit(f)(u), expected)
    assert np.array_equal(jax.jit(lambda u: f(2 * f(u)))(u), bare(op, 2 * expected))
    assert np.array_equal(bare(op, u), expected)


def test_the_input_is_untouched_and_results_do_not_share_memory(line, u):
    f = jax.jit(ct.embed(line.mass()))
    before = np.array(u)
    first = f(u)
    kept = np.array(first)
    f(2 * u)
    assert np.array_equal(u, before)
    assert np.array_equal(first, kept)


def test_control_flow(line, u):
    op = line.mass()
    f = ct.embed(op)
    matrix = dense(op)

    powers = jax.jit(lambda u: jax.lax.scan(lambda c, _: (f(c), f(c)), u, None, length=4)[1])(u)
    expected = np.array(u)
    for power in powers:
        expected = matrix @ expected
        assert np.allclose(power, expected, rtol=1e-12, atol=1e-16)

    loop = jax.jit(lambda u: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, u))[1])
    assert np.allclose(loop(u), matrix @ matrix @ matrix @ u, rtol=1e-12, atol=1e-16)

    choose = jax.jit(lambda p, u: jax.lax.cond(p, f, lambda u: -u, u))
    assert np.allclose(choose(True, u), matrix @ u, rtol=1e-12, atol=1e-16)
    assert np.array_equal(choose(False, u), -u)


def count_calls(function, *args):
    """Calls of the native handler in a compiled program."""
    return jax.jit(function).lower(*args).as_text().count("@ceedtap_operator(")


def test_vmap_is_one_call(line):
    op = line.mass()
    f = ct.embed(op)
    batch = jnp.asarray(np.random.default_rng(1).standard_normal((5, line.n)))
    expected = np.stack([bare(op, u) for u in batch])
    assert np.array_equal(jax.vmap(f)(batch), expected)
    assert np.array_equal(jax.jit(jax.vmap(f, 1, 1))(batch.T), expected.T)
    nested = jax.jit(jax.vmap(jax.vmap(f)))(jnp.stack([batch, 2 * batch]))
    assert np.array_equal(nested[0], expected)
    assert nested.shape == (2, 5, line.n)
    assert count_calls(jax.vmap(f), batch) == 1
    assert jax.vmap(f)(batch[:0]).shape == (0, line.n)


def test_derivatives_of_a_symmetric_operator(line, u):
    op = line.mass()
    f = ct.embed(op, symmetric=True)
    matrix = dense(op)
    assert np.allclose(jax.grad(lambda u: u @ f(u))(u), 2 * matrix @ u, rtol=1e-12)
    assert np.allclose(jax.jit(jax.hessian(lambda u: u @ f(u) / 2))(u), matrix, atol=1e-15)
    assert np.allclose(jax.jacfwd(f)(u), matrix, atol=1e-15)
    assert np.allclose(jax.jacrev(f)(u), matrix, atol=1e-15)
    value, tangent = jax.jvp(f, (u,), (2 * u,))
    assert np.allclose(tangent, 2 * value, rtol=1e-14)


def test_derivatives_with_a_transpose(line, u):
    forward, backward = line.advection()
    matrix = dense(forward)
    assert not np.allclose(matrix, matrix.T)
    assert np.allclose(dense(backward), matrix.T, atol=1e-15)
    for transpose in (backward, ct.embed(backward)):
        f = ct.embed(forward, transpose=transpose)
        assert np.allclose(jax.jit(jax.jacrev(f))(u), matrix, atol=1e-14)
        (row,) = jax.linear_transpose(f, u)(u)
        assert np.allclose(row, matrix.T @ u, atol=1e-13)
        # The transpose of the transpose is the operator.
        twice = jax.linear_transpose(lambda v, f=f: jax.linear_transpose(f, u)(v)[0], u)
        assert np.allclose(twice(u)[0], matrix @ u, atol=1e-13)


def test_gradient_through_a_loop(line, u):
    forward, backward = line.advection()
    f = ct.embed(forward, transpose=backward)
    matrix = jnp.asarray(dense(forward))

    def energy(apply):
        return lambda u: jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(apply(c)), None), u, None, length=3)[0] ** 2)

    assert np.allclose(jax.jit(jax.grad(energy(f)))(u), jax.grad(energy(lambda c: matrix @ c))(u), atol=1e-12)


def test_conjugate_gradients_of_jax(line, u):
    op = line.mass()
    x, _ = jax.jit(lambda b: jax.scipy.sparse.linalg.cg(ct.embed(op, symmetric=True), b, tol=1e-13))(u)
    assert np.allclose(dense(op) @ x, u, atol=1e-9)


def test_what_is_not_differentiable_says_how_it_could_be(line, u):
    f = ct.embed(line.mass())
    with pytest.raises(TypeError, match="linear=True"):
        jax.jvp(f, (u,), (u,))
    with pytest.raises(TypeError, match="symmetric=True"):
        jax.grad(lambda u: ct.embed(line.mass(), linear=True)(u).sum())(u)
    _, tangent = jax.jvp(ct.embed(line.mass(), linear=True), (u,), (u,))
    assert np.array_equal(tangent, f(u))


def test_a_nonlinear_operator(line, u):
    op = line.from_source("square", [("u", 1, ct.EVAL_INTERP), ("w", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_INTERP)])
    assert np.array_equal(jax.jit(ct.embed(op))(u), bare(op, u))


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_bad_inputs(line, how):
    f = how(ct.embed(line.mass()))
    with pytest.raises(TypeError, match=r"float64 here, the operator's input is float32.*astype"):
        f(jnp.zeros(line.n, jnp.float32))
    with pytest.raises(TypeError, match="int64"):
        f(jnp.zeros(line.n, int))
    with pytest.raises(ValueError, match=rf"shape \({line.n},\), got \({line.n - 1},\)"):
        f(jnp.zeros(line.n - 1))
    with pytest.raises(ValueError, match="vmap"):
        f(jnp.zeros((2, line.n)))
    assert f(jnp.zeros(line.n)).shape == (line.n,)


def test_numpy_input_of_any_layout(line, u):
    f = ct.embed(line.mass())
    strided = np.zeros((line.n, 2))
    strided[:, 0] = u
    assert np.array_equal(f(strided[:, 0]), f(u))
    assert np.array_equal(f(np.array(u)), f(u))


def test_without_x64_the_error_says_what_to_do():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import jax.numpy as jnp, numpy as np, ceedtap as ct
            ceed = ct.Ceed("/cpu/self")
            op = ceed.Operator(ceed.IdentityQFunction(1, ct.EVAL_NONE, ct.EVAL_NONE))
            r = ceed.StridedElemRestriction(2, 2, 1, 4, [1, 2, 2])
            for name in op.qfunction.fields:
                op.set_field(name, r, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
            f = ct.embed(op)
            for value in (jnp.zeros(4), np.zeros(4)):
                try:
                    f(value)
                except TypeError as error:
                    print("jax_enable_x64" in str(error))
        """)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_incomplete_operators(line):
    op = line.ceed.Operator(line.ceed.QFunctionByName("MassApply"))
    op.set_field("u", line.restriction, line.basis, ct.VECTOR_ACTIVE)
    with pytest.raises(ct.CeedError, match="qdata, v"):
        ct.embed(op)
    with pytest.raises(TypeError, match="operator"):
        ct.embed(lambda u: u)
    with pytest.raises(ValueError, match="either"):
        ct.embed(line.mass(), symmetric=True, transpose=line.mass())
    with pytest.raises(ValueError, match="exchanged"):
        ct.embed(line.mass(), transpose=Line(num_elem=5).mass())


def test_an_error_of_libceed_reaches_the_caller_and_poisons_the_operator(line, u):
    op = line.from_source("failing", [("u", 1, ct.EVAL_INTERP)], [("v", 1, ct.EVAL_INTERP)])
    f = jax.jit(ct.embed(op))
    assert f(u).shape == u.shape
    with pytest.raises(Exception, match="CeedOperatorApply failed with code"):
        f(1e6 + u).block_until_ready()
    with pytest.raises(Exception, match="Poisoned by"):
        f(u).block_until_ready()
    fresh = line.from_source("failing", [("u", 1, ct.EVAL_INTERP)], [("v", 1, ct.EVAL_INTERP)])
    assert jax.jit(ct.embed(fresh))(u).shape == u.shape


def test_two_threads(line):
    op = line.mass()
    f = jax.jit(ct.embed(op))
    inputs = [jnp.asarray(np.random.default_rng(i).standard_normal(line.n)) for i in range(2)]
    expected = [bare(op, u) for u in inputs]
    wrong = []

    def work(i):
        for _ in range(1000):
            if not np.array_equal(f(inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_program_and_python_share_an_operator(line, u):
    op = line.mass()
    f = jax.jit(ct.embed(op))
    expected = bare(op, u)
    stop = threading.Event()
    wrong = []

    def in_python():
        while not stop.is_set():
            if not np.array_equal(bare(op, u), expected):
                wrong.append("python")

    thread = threading.Thread(target=in_python)
    thread.start()
    for _ in range(300):
        if not np.array_equal(f(u), expected):
            wrong.append("jax")
    stop.set()
    thread.join()
    assert not wrong


def collect():
    jax.clear_caches()
    for _ in range(3):
        gc.collect()
    apply.OPERATORS.reap()


def test_operators_die_with_their_programs(u):
    collect()
    before = lib.ct_registry_size(lib.ct_operators())
    op = Line().mass()
    alive = weakref.ref(op)
    f = ct.embed(op, symmetric=True)
    compiled = jax.jit(f).lower(u).compile()
    expected = np.array(f(u))
    del op, f
    collect()
    assert alive() is not None  # the compiled program holds it
    assert np.array_equal(compiled(u), expected)
    del compiled
    collect()
    assert alive() is None
    assert lib.ct_registry_size(lib.ct_operators()) == before


def test_lowered_but_not_yet_compiled_programs_hold_their_operator(u):
    line = Line()
    op = line.mass()
    expected = bare(op, u)
    lowered = jax.jit(ct.embed(op)).lower(u)
    del op, line
    collect()
    assert np.array_equal(lowered.compile()(u), expected)


def test_many_operators_do_not_pile_up(u):
    collect()
    before = lib.ct_registry_size(lib.ct_operators())
    line = Line()
    for _ in range(50):
        f = ct.embed(line.mass(), symmetric=True)
        jax.grad(lambda u, f=f: f(u).sum())(u)
        del f
    collect()
    assert lib.ct_registry_size(lib.ct_operators()) <= before + 1


def test_a_foreign_key_is_an_error():
    call = jax.ffi.ffi_call("ceedtap_operator", jax.ShapeDtypeStruct((3,), jnp.float64))
    with pytest.raises(Exception, match="no embedded operator"):
        call(jnp.zeros(3), operator=np.uint64(12345))
    with pytest.raises(Exception, match="attribute `operator`"):
        call(jnp.zeros(3))


def test_an_operator_of_the_libceed_package(u):
    libceed = pytest.importorskip("libceed", reason="there is no libceed wheel for this Python")
    ceed = libceed.Ceed("/cpu/self/ref/serial")
    n = 12
    offsets = np.arange(n, dtype=np.int32)
    nodes = ceed.ElemRestriction(3, 4, 1, 1, n, offsets)
    qf = ceed.IdentityQFunction(1, libceed.EVAL_NONE, libceed.EVAL_NONE)
    op = ceed.Operator(qf)
    op.set_field("input", nodes, libceed.BASIS_NONE, libceed.VECTOR_ACTIVE)
    op.set_field("output", nodes, libceed.BASIS_NONE, libceed.VECTOR_ACTIVE)
    f = jax.jit(ct.embed(op))
    assert np.array_equal(f(u[:n]), u[:n])
    del op, qf, nodes, ceed
    gc.collect()
    assert np.array_equal(f(u[:n]), u[:n])


def test_a_composite_operator(line, u):
    composite = line.ceed.CompositeOperator()
    composite.add_sub(line.mass())
    composite.add_sub(line.advection()[0])
    expected = bare(line.mass(), u) + bare(line.advection()[0], u)
    assert np.allclose(jax.jit(ct.embed(composite))(u), expected, rtol=1e-13)


def test_a_tap_between_two_operators(line, u):
    op = line.mass()
    f = ct.embed(op)
    seen = []
    with ct.outfeed_receiver():
        jax.jit(lambda u: f(ct.id_tap(seen.append, f(u))))(u)
    assert np.array_equal(seen[0], bare(op, u))
