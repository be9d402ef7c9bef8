"""What a memory checker runs: vectors, views, DLPack, contexts, callbacks and operators, each used and dropped.

Run, with an allocator that shows the checker each of Python's blocks:

    PYTHONMALLOC=malloc valgrind --leak-check=full --show-leak-kinds=definite python tests/native/memory_ceed.py

The interpreter, numpy and the dynamic loader are reported as well. What counts is a report with a function of libCEED
(`Ceed...`) or of ceedtap (`ct_...`) in its stack.
"""

from __future__ import annotations

import contextlib
import gc

import numpy as np

from ceedtap import ceed as ct


def vectors(ceed: ct.Ceed) -> None:
    for n in (0, 1, 5, 100):
        v, w = ceed.Vector(n), ceed.Vector(n)
        v.set_array(np.arange(float(n)))
        w.set_value(2)
        w.axpy(2.0, v)
        w.pointwise_mult(v, w)
        w.copy_from(v)
        w.norm()
        shared = np.ones(n)
        w.set_array(shared, cmode=ct.USE_POINTER)
        w.scale(3)
        w.take_array()
        for name in ("get_array", "get_array_read", "get_array_write"):
            x = ceed.Vector(n)
            x.set_value(1)
            view = getattr(x, name)()
            del x
            gc.collect()
            view.sum()


def dlpack(ceed: ct.Ceed) -> None:
    v = ceed.Vector(100)
    v.set_value(1)
    aliases = [np.from_dlpack(v), np.asarray(v)[3:], v.to_numpy(10, 10)]
    with contextlib.suppress(BufferError):
        v.set_value(0)
    del aliases
    written = np.from_dlpack(v.exported(4, 25, write=True))
    written += 1
    del written
    v.__dlpack__(max_version=(1, 0))
    v.__dlpack__(max_version=(1, 0), copy=True)
    v.exported(write=True).__dlpack__()
    kept = np.from_dlpack(v)
    x = ct.Vector.from_dlpack(ceed, np.ones(7))
    x.scale(2)
    del v, x
    gc.collect()
    kept.sum()


def operators(ceed: ct.Ceed) -> None:
    nodes = ceed.ElemRestriction(5, 3, 1, 1, 11, np.arange(3) + 2 * np.arange(5)[:, None])
    points = ceed.StridedElemRestriction(5, 4, 1, 20, [1, 4, 4])
    basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
    qdata, u, v = ceed.Vector(20), ceed.Vector(11), ceed.Vector(11)
    qdata.set_value(1)
    u.set_value(1)
    context = ceed.QFunctionContext({"factor": 2.0, "n": [1, 2, 3]})

    def f(ctx: np.record, q: int, inputs: tuple, outputs: tuple) -> None:
        outputs[0][:] = ctx["factor"] * inputs[0] * inputs[1]

    fields = [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_INTERP)]
    for qf in (ceed.QFunctionByName("MassApply"), ceed.PythonQFunction(f, *fields, context)):
        op = ceed.Operator(qf)
        op.set_field("u", nodes, basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", points, ct.BASIS_NONE, qdata)
        op.set_field("v", nodes, basis, ct.VECTOR_ACTIVE)
        op.apply(u, v)
        op.linear_assemble_diagonal(v)
        rows, _ = op.linear_assemble_symbolic()
        values = ceed.Vector(rows.size)
        op.linear_assemble(values)
        assembled, restriction = op.linear_assemble_qfunction()
        restriction.apply(assembled, ceed.Vector(restriction.esize))
        op.view()
        op.create_fdm_element_inverse().apply(u, v)
        wrapped = ct.Vector.wrap(v.address, ceed)
        wrapped.set_value(3)
        composite = ceed.CompositeOperator()
        composite.add_sub(op)
        composite.apply(u, v)
        with contextlib.suppress(ValueError):
            op.apply(u, u)
    op.set_context("factor", 3.0)
    context.update(factor=4.0, n=[4, 5, 6])


def main() -> None:
    for resource in ("/cpu/self/ref/serial", "/cpu/self/opt/blocked", "/cpu/self"):
        ceed = ct.Ceed(resource)
        for work in (vectors, dlpack, operators):
            for _ in range(2):
                work(ceed)
                gc.collect()
    print("done")


if __name__ == "__main__":
    main()
