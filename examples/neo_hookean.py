"""A block of rubber, clamped at one end, whose other end is pulled and turned: Newton's method in one compiled program.

The physics is the energy density below. JAX differentiates it, and libCEED applies the force and its tangent. The
residual of every iteration is tapped, so that one can watch the program.
"""

import math

import jax
import jax.numpy as jnp

import ceedtap as ct

jax.config.update("jax_enable_x64", True)

ceed = ct.Ceed("/cpu/self")
mesh = ct.mesh.box(6, 3, 3, upper=(2.0, 1.0, 1.0))
V = ct.Space(ceed, mesh, degree=1, quadrature=2, components=3)
X = V.geometry
material = {"mu": 1 / 2.6, "lam": 0.3 / (1.3 * 0.4)}  # Young's modulus 1, Poisson's ratio 0.3


def psi(H: jax.Array, m: dict[str, jax.Array]) -> jax.Array:
    """Energy per volume of the undeformed body, for the gradient of the displacement, H = F - I."""
    trace = jnp.trace(H)
    # log det F; as log1p it has all its digits at the smallest strains
    lnJ = jnp.log1p(trace + (trace**2 - jnp.sum(H * H.T)) / 2 + jnp.linalg.det(H))
    return m["mu"] * (trace + jnp.sum(H * H) / 2 - lnJ) + m["lam"] / 2 * lnJ**2


@ct.operator(inputs={"u": V.grad, "x": X.grad, "w": X.weight}, outputs={"v": V.grad}, params=material)
def force(u: jax.Array, x: jax.Array, w: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    K = jnp.linalg.inv(x)
    P = jax.grad(psi)((K @ u).T, params)
    return w * jnp.linalg.det(x) * K.T @ P.T


residual = force.bind(x=mesh.points)
left, right = V.boundary_nodes("left"), V.boundary_nodes("right")
free = jnp.ones(V.shape).at[left].set(0).at[right].set(0)
points = jnp.asarray(V.nodes)


def boundary(stretch: jax.Array, angle: jax.Array) -> jax.Array:
    """Displacement of the end that is pulled, spread linearly over the block."""
    c, s = jnp.cos(angle), jnp.sin(angle)
    turned = (points - 0.5) @ jnp.array([[1.0, 0, 0], [0, c, s], [0, -s, c]]) + 0.5
    end = (turned - points).at[:, 0].set(2 * stretch)
    return points[:, :1] / 2 * end


@jax.jit
def solve(stretch: float, angle: float, m: dict[str, float]) -> tuple[jax.Array, jax.Array]:
    """Displacement and the forces at the nodes."""

    def constrained(u: jax.Array) -> jax.Array:
        return free * residual(u, params=m)

    def newton(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        u, _, k = state
        r, tangent = jax.linearize(constrained, u)
        step, _ = jax.scipy.sparse.linalg.cg(lambda d: tangent(free * d) + (1 - free) * d, -r, tol=1e-10)
        size = jnp.linalg.norm(r)
        ct.id_tap(lambda k, size: print(f"iteration {k}: residual {size:.3e}"), k, size)
        return u + step, size, k + 1

    start = boundary(stretch, angle), jnp.array(jnp.inf), 0
    u = jax.lax.while_loop(lambda state: (state[1] > 1e-10) & (state[2] < 20), newton, start)[0]
    return u, residual(u, params=m)


u, forces = solve(0.3, math.pi / 6, material)
ct.barrier_wait()
pull = forces[right, 0].sum()
plain = (force.reference(u, mesh.points, params=material) * free).ravel()
print(
    f"pull {pull:.8f}, balance {forces[left, 0].sum() + pull:.1e}, residual in plain JAX {jnp.linalg.norm(plain):.1e}"
)
