"""Operators at points, from libCEED 1.0 on."""

import numpy as np
import pytest
from ceed_helpers import array_of, lagrange, lobatto, vector_of

from ceedtap import ceed as ct
from ceedtap.ceed_ffi import CeedAccessError, CeedIncompleteError, load

pytestmark = pytest.mark.skipif(not load().has("CeedOperatorCreateAtPoints"), reason="needs libCEED 1.0")
POINTS = [[0, 2], [3], [1, 4, 5]]
COORDINATES = np.array([-0.5, 0.3, 0.2, -0.9, 0.1, 0.6])
DATA = np.arange(1.0, 7.0)


class Mass:
    """A mass operator on three line elements of degree 3, with a few points in each, and its matrix."""

    def __init__(self, ceed):
        self.nodes = ceed.ElemRestriction(3, 4, 1, 1, 10, np.arange(4) + 3 * np.arange(3)[:, None])
        self.basis = ceed.BasisTensorH1Lagrange(1, 1, 4, 5, ct.GAUSS)
        self.points = ceed.AtPointsElemRestriction(3, 1, 6, POINTS)
        self.data = vector_of(ceed, DATA)
        self.op = ceed.OperatorAtPoints(ceed.QFunctionByName("MassApply"))
        self.matrix = np.zeros((10, 10))
        for element, points in enumerate(POINTS):
            values = lagrange(lobatto(4), COORDINATES[points])[0]
            rows = np.arange(4) + 3 * element
            self.matrix[np.ix_(rows, rows)] += values.T @ np.diag(DATA[points]) @ values

    def fields(self):
        self.op.set_field("u", self.nodes, self.basis, ct.VECTOR_ACTIVE)
        self.op.set_field("qdata", self.points, ct.BASIS_NONE, self.data)
        self.op.set_field("v", self.nodes, self.basis, ct.VECTOR_ACTIVE)


def test_mass(ceed):
    mass = Mass(ceed)
    mass.op.set_points(mass.points, vector_of(ceed, COORDINATES))
    mass.fields()
    u = np.random.default_rng(0).random(10)
    v = ceed.Vector(10)
    mass.op.apply(vector_of(ceed, u), v)
    np.testing.assert_allclose(array_of(v), mass.matrix @ u, atol=1e-13)
    mass.op.linear_assemble_diagonal(v)
    np.testing.assert_allclose(array_of(v), np.diag(mass.matrix), atol=1e-13)
    np.testing.assert_allclose(mass.op.to_scipy().toarray(), mass.matrix, atol=1e-13)


@pytest.mark.parametrize("order", ["points first", "points last", "points between"])
def test_any_order_of_calls(ceed, order):
    mass, coordinates = Mass(ceed), vector_of(ceed, COORDINATES)
    steps = [
        lambda: mass.op.set_field("u", mass.nodes, mass.basis, ct.VECTOR_ACTIVE),
        lambda: mass.op.set_field("qdata", mass.points, ct.BASIS_NONE, mass.data),
        lambda: mass.op.set_field("v", mass.nodes, mass.basis, ct.VECTOR_ACTIVE),
    ]
    place = ("points first", "points between", "points last").index(order)
    steps.insert((0, 2, 3)[place], lambda: mass.op.set_points(mass.points, coordinates))
    for step in steps:
        step()
    u, v = np.random.default_rng(1).random(10), ceed.Vector(10)
    mass.op.apply(vector_of(ceed, u), v)
    np.testing.assert_allclose(array_of(v), mass.matrix @ u, atol=1e-13)


def test_refusals():
    ceed = ct.Ceed("/cpu/self")
    mass, coordinates = Mass(ceed), vector_of(ceed, COORDINATES)
    with pytest.raises(CeedIncompleteError, match="has no points"):
        mass.op.check()
    with pytest.raises(TypeError, match="rstr_points: expected an AtPointsElemRestriction"):
        mass.op.set_points(mass.nodes, coordinates)
    with pytest.raises(ValueError, match="needs a vector of 6 entries"):
        mass.op.set_points(mass.points, ceed.Vector(5))
    mass.op.set_points(mass.points, coordinates)
    with pytest.raises(CeedAccessError, match="set once"):
        mass.op.set_points(mass.points, coordinates)
    other = ceed.AtPointsElemRestriction(3, 1, 6, POINTS[::-1])
    for restriction, basis, message in (
        (other, ct.BASIS_NONE, "expected one to the points of the operator"),
        (mass.nodes, ct.BASIS_NONE, "expected one to the points of the operator"),
    ):
        with pytest.raises(ValueError, match=message):
            mass.op.set_field("qdata", restriction, basis, mass.data)
    with pytest.raises(ValueError, match="takes no basis"):
        mass.op.set_field("u", mass.points, mass.basis, ct.VECTOR_ACTIVE)
    late = Mass(ceed)
    late.fields()
    with pytest.raises(CeedIncompleteError, match="has no points"):
        late.op.check()
    with pytest.raises(ValueError, match=r"'qdata'.*expected one to the points of the operator"):
        late.op.set_points(other, coordinates)
    two = ceed.OperatorAtPoints(ceed.IdentityQFunction(1, ct.EVAL_NONE, ct.EVAL_NONE))
    two.set_field("input", mass.points, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    with pytest.raises(ValueError, match="has other points than"):
        two.set_field("output", other, ct.BASIS_NONE, ct.VECTOR_ACTIVE)
    plain = ceed.Operator(ceed.QFunctionByName("MassApply"))
    with pytest.raises(ValueError, match="is for OperatorAtPoints"):
        plain.set_field("qdata", mass.points, ct.BASIS_NONE, mass.data)
