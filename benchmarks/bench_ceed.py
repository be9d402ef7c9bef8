"""What a call from Python costs: applying an operator of one element, against the bare C function.

Run: python benchmarks/bench_ceed.py
"""

import sys

import numpy as np
from pairs import compare, report, seconds

import ceedtap as ct

PAIRS, CALLS = 21, 2000


def mass(ceed: ct.Ceed) -> ct.Operator:
    """A mass operator on one line element."""
    nodes = ceed.ElemRestriction(1, 3, 1, 1, 3, np.arange(3))
    points = ceed.StridedElemRestriction(1, 4, 1, 4, [1, 4, 4])
    basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
    qdata = ceed.Vector(4)
    qdata.set_value(1)
    op = ceed.Operator(ceed.QFunctionByName("MassApply"))
    op.set_field("u", nodes, basis, ct.VECTOR_ACTIVE)
    op.set_field("qdata", points, ct.BASIS_NONE, qdata)
    op.set_field("v", nodes, basis, ct.VECTOR_ACTIVE)
    return op


def main() -> int:
    ok = True
    for resource in ("/cpu/self/ref/serial", "/cpu/self/opt/blocked", "/cpu/self"):
        ceed = ct.Ceed(resource)
        op, u, v = mass(ceed), ceed.Vector(3), ceed.Vector(3)
        u.set_value(1)
        op.apply(u, v)
        bare, request = ceed.library.lib.CeedOperatorApply, ceed.library.request_immediate
        pointers = op.pointer, u.pointer, v.pointer
        ours, theirs, _ = compare(
            lambda op=op, u=u, v=v: seconds(lambda: op.apply(u, v), CALLS),
            lambda bare=bare, pointers=pointers, request=request: seconds(lambda: bare(*pointers, request), CALLS),
            PAIRS,
        )
        ok &= report(f"Operator.apply, one element, {resource}", 1e6 * ours, "us", 6)
        report("  the C function alone, by cffi", 1e6 * theirs, "us")
    ceed = ct.Ceed("/cpu/self")
    x = ceed.Vector(1000)
    x.set_value(1)
    values = np.ones(1000)
    for name, call in (
        ("Vector.set_array, 1000 entries", lambda: x.set_array(values)),
        ("Vector.get_array_read() and restore", lambda: (x.get_array_read(), x.restore_array_read())),
        ("Vector.to_numpy()", x.to_numpy),
        ("Vector.to_jax()", x.to_jax),
    ):
        report(name, 1e6 * min(seconds(call, CALLS) for _ in range(5)), "us")
    return 0 if ok else 1


if __name__ == "__main__":
    import jax

    jax.config.update("jax_enable_x64", True)
    sys.exit(main())
