"""A libCEED operator inside a compiled JAX program, and a derivative through it."""

import jax
import jax.numpy as jnp

import ceedtap as ct

jax.config.update("jax_enable_x64", True)

# libCEED: the Laplace operator on cubic hexahedra. What the geometry contributes is computed once, as `qdata`.
ceed = ct.Ceed("/cpu/self")
space = ct.Space(ceed, ct.mesh.box(8, 8, 8), degree=3)
geometry, quadrature = space.geometry, space.quadrature_restriction(6)
points, qdata = ceed.Vector(geometry.lsize), ceed.Vector(6 * space.mesh.num_cells * space.num_quadrature_points)
points.set_array(space.mesh.points.ravel())
build = ceed.Operator(ceed.QFunctionByName("Poisson3DBuild"))
build.set_field("dx", geometry.restriction, geometry.basis, ct.VECTOR_ACTIVE)
build.set_field("weights", ct.ELEMRESTRICTION_NONE, geometry.basis, ct.VECTOR_NONE)
build.set_field("qdata", quadrature, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
build.apply(points, qdata)
operator = ceed.Operator(ceed.QFunctionByName("Poisson3DApply"))
operator.set_field("du", space.restriction, space.basis, ct.VECTOR_ACTIVE)
operator.set_field("qdata", quadrature, ct.BASIS_NONE, qdata)
operator.set_field("dv", space.restriction, space.basis, ct.VECTOR_ACTIVE)

# JAX: the operator is a function like any other.
laplace = ct.embed(operator, symmetric=True)


@jax.jit
def energy(k, x):
    u = jnp.sin(k * x[:, 0])
    return u @ laplace(u) / 2


value, slope = jax.value_and_grad(energy)(2.0, jnp.asarray(space.nodes))
print(f"energy {value:.8f}, exact {1 + jnp.sin(4) / 4:.8f}")
print(f"slope  {slope:.8f}, exact {1 + jnp.sin(4) / 8 + jnp.cos(4) / 2:.8f}")
