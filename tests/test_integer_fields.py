"""Integers and booleans at the quadrature points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS

import ceedtap as ct

MESH = ct.mesh.box(3, 3)
MODULI = np.array([1.0, 10.0, 100.0])


def materials(V):
    return jnp.asarray(np.random.default_rng(0).integers(0, 3, (MESH.num_cells, V.num_quadrature_points)), jnp.int32)


def stiffness(V, **options):
    """A law that looks its modulus up by the number of the material."""

    @ct.operator(
        inputs={"u": V.value, "m": ct.quadrature(dtype=jnp.int32), "on": ct.quadrature(dtype=bool)},
        outputs={"v": V.value},
        **options,
    )
    def law(u, m, on):
        assert m.dtype == jnp.int32
        assert on.dtype == jnp.bool_
        return jnp.where(on, jnp.asarray(MODULI)[m] * u**2, 0.0)

    return law


@pytest.mark.parametrize("backend", BACKENDS)
def test_material_numbers(backend):
    V = ct.Space(ct.Ceed(backend), MESH, degree=2)
    law, m = stiffness(V), materials(V)
    on = jnp.asarray(np.random.default_rng(1).random(m.shape) < 0.5)
    u = jnp.asarray(np.random.default_rng(2).normal(size=V.num_nodes))
    at_points = np.asarray(u)[V.element_nodes] @ V.basis.get_interp().T
    modulus = np.where(on, MODULI[np.asarray(m)], 0)

    def scattered(values):
        out = np.zeros(V.num_nodes)
        np.add.at(out, V.element_nodes, values @ V.basis.get_interp())
        return out

    np.testing.assert_allclose(jax.jit(law)(u, m, on), scattered(modulus * at_points**2), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(law.reference(u, m, on), law(u, m, on), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(law.bind(m=m, on=on)(u), law(u, m, on), rtol=1e-14, atol=1e-14)
    gradient = jax.jit(jax.grad(lambda u: law(u, m, on).sum()))(u)
    np.testing.assert_allclose(gradient, scattered(2 * modulus * at_points), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)])
@pytest.mark.parametrize("declared", ["int8", "int32", "int64", "uint16"])
def test_numbers_of_any_integer_type_are_taken(kind, declared):
    """Mesh files have what they have; in a compiled program and bound, as NumPy's arrays and as JAX's."""
    V = ct.Space(ct.Ceed("/cpu/self"), MESH, degree=1)

    @ct.operator(inputs={"u": V.value, "m": ct.quadrature(dtype=declared)}, outputs={"v": V.value})
    def law(u, m):
        assert m.dtype == declared
        return jnp.asarray(MODULI)[m] * u

    m, u = materials(V), jnp.ones(V.num_nodes)
    expected = law(u, m.astype(declared))
    given = np.asarray(m).astype(kind)
    for result in (law(u, given), jax.jit(law)(u, jnp.asarray(given)), law.bind(m=given)(u), law.reference(u, given)):
        np.testing.assert_allclose(result, expected, rtol=1e-14)


def test_they_have_no_derivatives():
    V = ct.Space(ct.Ceed("/cpu/self"), MESH, degree=1)
    law, m = stiffness(V), materials(V)
    on = jnp.ones(m.shape, bool)
    u = jnp.ones(V.num_nodes)
    tangents = (jnp.ones_like(u), np.zeros(m.shape, jax.dtypes.float0), np.zeros(m.shape, jax.dtypes.float0))
    _, dv = jax.jvp(law, (u, m, on), tangents)
    np.testing.assert_allclose(dv, 2 * law(u, m, on), rtol=1e-13)
    _, dm, _ = jax.grad(lambda *args: law(*args).sum(), (0, 1, 2), allow_int=True)(u, m, on)
    assert dm.dtype == jax.dtypes.float0
    with pytest.raises(ValueError, match="can be linearised in u, got 'm'"):
        law.linearize(u, m, on, wrt="m")


def test_outputs_and_batches():
    V = ct.Space(ct.Ceed("/cpu/self"), MESH, degree=1)

    @ct.operator(
        inputs={"u": V.value}, outputs={"n": ct.quadrature(2, dtype=jnp.int64), "big": ct.quadrature(dtype=bool)}
    )
    def count(u):
        n = jnp.floor(u).astype(jnp.int64)
        return jnp.stack([n, -n]), u > 2

    u = jnp.stack([jnp.full(V.num_nodes, 1.5), jnp.full(V.num_nodes, 3.5)])
    n, big = jax.jit(jax.vmap(count))(u)
    assert (n.dtype, big.dtype) == (jnp.int64, jnp.bool_)
    assert np.unique(n[0]).tolist() == [-1, 1]
    assert np.unique(n[1]).tolist() == [-3, 3]
    assert not big[0].any()
    assert big[1].all()


class TestErrors:
    @pytest.fixture
    def V(self):
        return ct.Space(ct.Ceed("/cpu/self"), MESH, degree=1)

    def test_another_type(self, V):
        law, m = stiffness(V), materials(V)
        on = jnp.ones(m.shape, bool)
        with pytest.raises(
            TypeError, match=r"the field m of law is int32, got float64; convert it with .astype\('int32'\)"
        ):
            law(jnp.ones(V.num_nodes), m.astype(jnp.float64), on)
        with pytest.raises(TypeError, match="the field m of law is int32, got float"):
            law.bind(m=1.0)
        with pytest.raises(ValueError, match="the field on of law has the shape"):
            law(jnp.ones(V.num_nodes), m, on[0])

    def test_real_is_no_choice(self):
        with pytest.raises(
            TypeError, match="dtype= is an integer type or bool; real data have libCEED's type, got float32"
        ):
            ct.quadrature(dtype=jnp.float32)

    def test_output_of_another_kind(self, V):
        def f(u):
            return u

        with pytest.raises(TypeError, match="the output n of f is int32, got float64"):
            ct.operator(inputs={"u": V.value}, outputs={"n": ct.quadrature(dtype=jnp.int32)})(f)
        with pytest.raises(TypeError, match="the output n of f is bool, got float64"):
            ct.operator(inputs={"u": V.value}, outputs={"n": ct.quadrature(dtype=bool)})(f)
