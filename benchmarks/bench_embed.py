"""An embedded operator against the bare CeedOperatorApply: BP3 (scalar Poisson) with about 50 000 nodes.

Run: python benchmarks/bench_embed.py
"""

import sys

import jax
import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

jax.config.update("jax_enable_x64", True)
PAIRS = 41


def poisson(ceed: ct.Ceed, degree: int, num_nodes: int) -> ct.Operator:
    """The operator of BP3 on the unit cube: p + 2 Gauss points per direction, geometric factors computed once."""
    n = round((num_nodes ** (1 / 3) - 1) / degree)
    space = ct.Space(ceed, ct.mesh.box(n, n, n), degree)
    num_elem, geometry = space.mesh.num_cells, space.geometry
    qdata = ceed.Vector(6 * num_elem * space.num_quadrature_points)
    qdata_restriction = space.quadrature_restriction(6)

    build = ceed.Operator(ceed.QFunctionByName("Poisson3DBuild"))
    build.set_field("dx", geometry.restriction, geometry.basis, ct.VECTOR_ACTIVE)
    build.set_field("weights", ct.ELEMRESTRICTION_NONE, geometry.basis, ct.VECTOR_NONE)
    build.set_field("qdata", qdata_restriction, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    points = ceed.Vector(geometry.lsize)
    points.set_array(space.mesh.points.reshape(-1))
    build.apply(points, qdata)

    op = ceed.Operator(ceed.QFunctionByName("Poisson3DApply"))
    op.set_field("du", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    op.set_field("qdata", qdata_restriction, ct.BASIS_NONE, qdata)
    op.set_field("dv", space.restriction, space.basis, ct.VECTOR_ACTIVE)
    return op


def main() -> int:
    ok = True
    for degree in (1, 2, 3, 6):
        ceed = ct.Ceed("/cpu/self")
        op = poisson(ceed, degree, 50_000)
        n = op.active_lengths[0]
        u = np.random.default_rng(0).standard_normal(n)
        a, b = ceed.Vector(n), ceed.Vector(n)
        a.set_array(u)
        f, x = jax.jit(ct.embed(op)), jax.numpy.asarray(u)
        op.apply(a, b)
        with b.array_read() as expected:
            assert np.array_equal(f(x), expected), "the embedded operator gives other bits"
        embedded, bare, ratio = compare(
            lambda f=f, x=x: seconds(lambda: f(x).block_until_ready(), 3),
            lambda op=op, a=a, b=b: seconds(lambda: op.apply(a, b), 3),
            PAIRS,
        )
        print(f"BP3 p={degree}, {n} nodes: embedded {1e3 * embedded:.3f} ms, bare {1e3 * bare:.3f} ms")
        ok &= report(f"embedded / bare, p={degree}", ratio, "", 1.05)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
