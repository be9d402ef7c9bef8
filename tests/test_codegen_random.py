"""Random numbers in point functions, from keys that come in as data: the bits of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codegen_helpers import check

import ceedtap as ct

KEYS = np.random.default_rng(0).integers(0, 2**32, (23, 2)).astype(float)


def key_of(k):
    return jax.random.wrap_key_data(k.astype(jnp.uint32))


DRAWS = {
    "bits": lambda k: jax.random.bits(key_of(k), (5,), "uint32"),
    "raw": lambda k: jax.random.bits(k.astype(jnp.uint32), (3,), "uint32"),
    "bytes": lambda k: (jax.random.bits(key_of(k), (5,), "uint8"), jax.random.bits(key_of(k), (2,), "uint16")),
    "64 bits": lambda k: jnp.stack([b := jax.random.bits(key_of(k), (3,), "uint64"), b >> 32]).astype(jnp.uint32),
    "uniform": lambda k: (jax.random.uniform(key_of(k), (4,)), jax.random.uniform(key_of(k), (), jnp.float32)),
    "range": lambda k: jax.random.uniform(k.astype(jnp.uint32), (2, 2), minval=-3.0, maxval=5.0),
    "integers": lambda k: jax.random.randint(key_of(k), (6,), -4, 9),
    "bernoulli": lambda k: jax.random.bernoulli(key_of(k), 0.3, (6,)),
    "split": lambda k: jax.random.key_data(jax.random.split(key_of(k), 3)),
    "two keys": lambda k: [jax.random.uniform(s, (2,)) for s in jax.random.split(key_of(k))],
    "raw split": lambda k: jax.random.split(k.astype(jnp.uint32))[1],
    "fold in": lambda k: jax.random.key_data(jax.random.fold_in(key_of(k), jnp.int32(k[0] % 1000))),
    "seed": lambda k: jax.random.key_data(jax.random.key(jnp.int32(k[0] % 1000))),
    "closed over": lambda k: jax.random.uniform(jax.random.fold_in(jax.random.key(7), jnp.uint32(k[1])), (2,)),
    "permutation": lambda k: jax.random.permutation(key_of(k), 6),
    "batched": lambda k: jax.vmap(lambda s: jax.random.uniform(s))(jax.random.split(key_of(k), 3)),
    "in a loop": lambda k: jax.lax.scan(
        lambda c, i: (c + jax.random.uniform(jax.random.fold_in(key_of(k), i)), c), 0.0, jnp.arange(30)
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_equal_bits(name):
    check(DRAWS[name], KEYS, rtol=0)


def test_normal_numbers():
    """The uniform numbers in them are equal; their quantiles are calculated with another approximation."""
    check(lambda k: jax.random.normal(key_of(k), (4,)), KEYS, rtol=1e-13)


def test_an_operator_with_a_key_at_every_point():
    space = ct.Space(ct.Ceed("/cpu/self"), ct.mesh.box(2, 2), degree=1)

    @ct.operator(inputs={"u": space.value, "k": ct.quadrature(2, dtype=np.uint32)}, outputs={"v": space.value})
    def noisy(u, k):
        return u * (1 + 0.1 * jax.random.normal(jax.random.wrap_key_data(k)))

    keys = jax.random.key_data(jax.random.split(jax.random.key(3), (4, space.num_quadrature_points)))
    u = jnp.asarray(space.nodes[:, 0])
    np.testing.assert_allclose(noisy(u, keys), noisy.reference(u, keys), rtol=1e-12)
    assert np.ptp(np.asarray(noisy(jnp.ones_like(u), keys) / noisy.reference(jnp.ones_like(u), 0 * keys))) > 1e-3
