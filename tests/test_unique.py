"""Objects that stand for something outside of Python are not copied or pickled; what is plain data is."""

import copy
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, vector_of

import ceedtap as ct
from ceedtap.ceed_constants import Sentinel
from ceedtap.ceed_object import CeedObject
from ceedtap.unique import Unique

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, **{
    f"pickle {n}": lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)
}}  # fmt: skip


def square(ctx, q, inputs, outputs):
    outputs[0][:] = inputs[0] ** 2


def objects(ceed):
    """One object of each kind."""
    mass = Mass1D(ceed)
    composite = ceed.CompositeOperator()
    composite.add_sub(mass.op)
    nodes, none = (2, 2, 1, 1, 3, [[0, 1], [1, 2]]), ct.EVAL_NONE
    matrices = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(2), np.zeros(2)
    vectors = np.zeros((2, 1, 3)), np.zeros((1, 3)), np.zeros((2, 1)), np.zeros(1)
    V = ct.Space(ceed, ct.mesh.box(2, 2), degree=1)

    @ct.operator(inputs={"u": V.value, "w": V.weight}, outputs={"v": V.value})
    def point(u, w):
        return u * w

    embedded = ct.embed(mass.op, symmetric=True)
    yield from (ceed, ceed.library, ceed.lock, mass.qdata, mass.restriction, mass.strided, mass.basis)
    yield from (mass.op, mass.op.qfunction, composite, embedded._application, point._application)
    yield ceed.QFunctionContext({"nu": 0.3})
    yield ceed.IdentityQFunction(1, none, none)
    yield ceed.PythonQFunction(square, [("u", 1, none)], [("v", 1, none)])
    yield ceed.QFunction(1, 4096, "")
    yield ceed.OrientedElemRestriction(*nodes, np.zeros((2, 2), bool))
    yield ceed.CurlOrientedElemRestriction(*nodes, np.zeros((2, 6), int))
    yield ceed.BlockedElemRestriction(2, 2, 8, *nodes[2:])
    yield ceed.BlockedStridedElemRestriction(2, 2, 8, 1, 4, [1, 2, 2])
    yield ceed.BasisTensorH1(1, 1, 3, 2, *matrices)
    yield ceed.BasisH1(ct.LINE, 1, 3, 2, *matrices)
    yield ceed.BasisHdiv(ct.TRIANGLE, 1, 3, 1, *vectors)
    yield ceed.BasisHcurl(ct.TRIANGLE, 1, 3, 1, *vectors)
    yield mass.basis.create_projection(ceed.BasisTensorH1Lagrange(1, 1, 4, 4, ct.GAUSS))
    yield mass.op.create_fdm_element_inverse()


def containers(ceed):
    """What refers to such objects: its copies are shallow, or refused."""
    mass = Mass1D(ceed)
    yield from (mass.restriction.T, mass.basis.T, mass.qdata.exported(2, 22), mass.qdata.array(), mass.op.fields)
    yield from (ct.embed(mass.op, linear=True), [mass.qdata], {"op": mass.op})
    yield ct.Space(ceed, ct.mesh.box(2, 2), degree=1)


@pytest.mark.parametrize("how", COPIES)
def test_every_kind_is_refused_with_the_reason(one, how):
    kinds = set()
    for thing in objects(one):
        kinds.add(type(thing))
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: it stands for .* Instead, \w") as info:
            COPIES[how](thing)
        assert repr(thing) in str(info.value)
    wanted = {ct.ceed.Ceed, *(kind for kind in vars(ct.ceed).values() if isinstance(kind, type) and issubclass(
        kind, CeedObject))}  # fmt: skip
    missing = {kind for kind in wanted - kinds if not any(issubclass(k, kind) or issubclass(kind, k) for k in kinds)}
    assert {kind.__name__ for kind in missing} <= {"AtPointsElemRestriction"}
    assert all(issubclass(kind, Unique) for kind in wanted)


@pytest.mark.parametrize("how", COPIES)
def test_what_holds_them_is_refused_unless_the_copy_is_shallow(one, how):
    for thing in containers(one):
        if how == "copy":
            assert type(copy.copy(thing)) is type(thing)
        else:
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                COPIES[how](thing)


def test_nothing_is_freed_by_a_refused_copy(ceed):
    mass = Mass1D(ceed)
    for how in COPIES.values():
        for thing in (mass.basis, mass.op, mass.qdata, mass.restriction, ceed):
            with pytest.raises(TypeError):
                how(thing)
    gc.collect()
    v = ceed.Vector(mass.lsize)
    mass.op.apply(vector_of(ceed, np.ones(mass.lsize)), v)
    np.testing.assert_allclose(array_of(v), mass.matrix @ np.ones(mass.lsize), rtol=1e-13)


def test_shallow_copies_compute_after_the_original_is_gone(one):
    mass = Mass1D(one)
    u = np.linspace(0, 1, mass.lsize)
    embedded = ct.embed(mass.op, symmetric=True)
    copied = copy.copy(embedded)
    del embedded
    gc.collect()
    np.testing.assert_allclose(jax.jit(copied)(jnp.asarray(u)), mass.matrix @ u, rtol=1e-12, atol=1e-15)
    transposed = copy.copy(mass.basis.T)
    v = one.Vector(3)
    transposed.apply(1, ct.EVAL_INTERP, vector_of(one, np.eye(4)[1]), v)
    np.testing.assert_allclose(array_of(v), mass.basis.get_interp()[1], rtol=1e-13)


@pytest.mark.parametrize("how", COPIES)
def test_plain_data(how):
    for constant in (value for value in vars(ct.ceed).values() if isinstance(value, Sentinel)):
        assert COPIES[how](constant) is constant
    mesh = ct.mesh.box(2, 3)
    copied = COPIES[how](mesh)
    np.testing.assert_array_equal(copied.points, mesh.points)
    np.testing.assert_array_equal(copied.cells, mesh.cells)
    assert {*copied.boundary} == {*mesh.boundary}
    for name, rows in mesh.boundary.items():
        np.testing.assert_array_equal(copied.boundary[name], rows)
