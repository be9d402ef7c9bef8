"""What `apply` checks is checked for embedded operators too: when a program is traced, and whenever it runs."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import BACKENDS, Mass1D, array_of, check_python, vector_of

import ceedtap as ct
from ceedtap.ceed_ffi import load

RAISED = (ct.CeedError, jax.errors.JaxRuntimeError, ValueError)  # JAX makes the last of an error on its fast path

SOURCE = """
CEED_QFUNCTION(scaled)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  const CeedScalar factor = *(const CeedScalar *)ctx;
  for (CeedInt i = 0; i < Q; i++) out[0][i] = factor * in[1][i] * in[0][i];
  for (CeedInt i = 0; i < Q; i++) out[1][i] = in[0][i];
  return 0;
}
CEED_QFUNCTION(failing)(void *ctx, const CeedInt Q, const CeedScalar *const *in, CeedScalar *const *out) {
  for (CeedInt i = 0; i < Q; i++) {
    out[0][i] = in[1][i] * in[0][i];
    if (in[0][i] > 1e3) return 5;
  }
  return 0;
}
"""


class Scaled:
    """``factor * mass``, with a passive input, a passive output and a context; and its matrix."""

    def __init__(self, ceed):
        self.ceed, mass = ceed, Mass1D(ceed)
        self.mass, self.qdata, self.lsize = mass, mass.qdata, mass.lsize
        self.context = ceed.QFunctionContext()
        inputs = [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)]
        outputs = [("v", 1, ct.EVAL_INTERP), ("seen", 1, ct.EVAL_NONE)]
        self.seen = ceed.Vector(len(mass.qdata))
        self.qf = ct.QFunction.from_source(ceed, SOURCE, "scaled", inputs, outputs, context=self.context)
        self.op = ceed.Operator(self.qf)
        self.op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        self.op.set_field("qdata", mass.strided, ct.BASIS_NONE, self.qdata)
        self.op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
        self.op.set_field("seen", mass.strided, ct.BASIS_NONE, self.seen)
        self.set()
        self.matrix = 2.0 * mass.matrix

    def set(self):
        self.context.set_data(np.array([2.0]))
        self.qdata.set_array(self.mass.data)


def broken_states(s):
    """What can be wrong, as (how to bring it about, how to mend it, what the error says)."""
    shared = np.array(s.mass.data).reshape(-1)

    def unset():
        s.qdata.set_array(shared, cmode=ct.USE_POINTER)
        s.qdata.take_array()

    blocks = []

    def enter(block):
        blocks.append(block)
        block.__enter__()

    def leave():
        blocks.pop().__exit__(None, None, None)

    held = []
    yield "no data", unset, s.set, "qdata.*no data"
    yield "written", s.qdata.get_array, s.qdata.restore_array, "qdata.*locked by an array for writing"
    exported = s.qdata.exported(write=True)
    yield "exported", lambda: held.append(np.from_dlpack(exported)), held.clear, "qdata"
    yield "written in a block", lambda: enter(s.qdata.array()), leave, "qdata.*locked by an array for writing"
    yield "output read", s.seen.get_array_read, s.seen.restore_array_read, "seen.*locked by"
    yield "output written", s.seen.get_array, s.seen.restore_array, "seen.*locked by"
    yield "output exported", lambda: held.append(s.seen.to_numpy()), held.clear, "seen"
    yield "context written", lambda: enter(s.context.data()), leave, r"locked by a `with data\(\)` block"


STATES = ("no data", "written", "exported", "written in a block", "output read", "output written", "output exported",
          "context written")  # fmt: skip


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("resource", [*BACKENDS, "composite"])
def test_a_state_that_libceed_would_fail_for(resource, name):
    s = Scaled(ct.Ceed("/cpu/self" if resource == "composite" else resource))
    op, matrix = s.op, s.matrix
    if resource == "composite":
        op = s.ceed.CompositeOperator()
        op.add_sub(s.op)
        op.add_sub(Mass1D(s.ceed).op)
        matrix = s.matrix + s.mass.matrix
    u = np.random.default_rng(0).standard_normal(s.lsize)
    x, v = jnp.asarray(u), s.ceed.Vector(s.lsize)
    s.op.apply(vector_of(s.ceed, u), v)  # gives the passive output its data
    f = ct.embed(op, linear=True)
    compiled = jax.jit(f)
    batched = jax.jit(jax.vmap(f))
    np.testing.assert_allclose(compiled(x), matrix @ u, atol=1e-13)
    np.testing.assert_allclose(batched(jnp.stack([x, 2 * x]))[1], 2 * matrix @ u, atol=1e-13)
    _, wreck, mend, text = next(state for state in broken_states(s) if state[0] == name)
    wreck()
    for run in (lambda: compiled(x), lambda: batched(jnp.stack([x, x])), lambda: jax.jvp(compiled, (x,), (x,))):
        with pytest.raises(RAISED, match=text):
            jax.block_until_ready(run())
        assert op.poisoned == s.op.poisoned == ""
    for trace in (lambda: f(x), lambda: jax.jit(lambda x: f(x) + 1).lower(x)):
        with pytest.raises(ct.CeedError, match=text):
            trace()
    with pytest.raises(ct.CeedError, match=text):
        op.apply(vector_of(s.ceed, u), v)
    mend()
    np.testing.assert_allclose(compiled(x), matrix @ u, atol=1e-13)
    np.testing.assert_allclose(f(x), matrix @ u, atol=1e-13)
    op.apply(vector_of(s.ceed, u), v)
    np.testing.assert_allclose(array_of(v), matrix @ u, atol=1e-13)
    # The passive output has the input at the quadrature points.
    np.testing.assert_allclose(
        array_of(s.seen).reshape(s.mass.n, -1), u[s.mass.offsets] @ s.mass.basis.get_interp().T, atol=1e-13
    )


def test_data_that_never_came(ceed):
    s = Scaled(ceed)
    f = ct.embed(s.op, linear=True)
    fresh = ceed.QFunctionContext()
    s.qf.set_context(fresh)
    x = jnp.ones(s.lsize)
    with pytest.raises(ct.CeedIncompleteError, match="no data; use set_data first"):
        f(x)
    fresh.set_data(np.array([2.0]))
    np.testing.assert_allclose(f(x), s.matrix @ x, atol=1e-13)
    compiled = jax.jit(f)
    compiled(x)
    s.qf.set_context(ceed.QFunctionContext())  # another one, after the program was compiled
    with pytest.raises(RAISED, match=r"the context of .*scaled.*no data; use set_data first"):
        compiled(x).block_until_ready()
    assert s.op.poisoned == ""
    s.qf.set_context(s.context)
    np.testing.assert_allclose(compiled(x), s.matrix @ x, atol=1e-13)


def test_a_passive_vector_without_data_when_the_program_is_traced(one):
    mass = Mass1D(one)
    op = one.Operator(one.QFunctionByName("MassApply"))
    empty = one.Vector(len(mass.qdata))
    op.set_field("u", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
    op.set_field("qdata", mass.strided, ct.BASIS_NONE, empty)
    op.set_field("v", mass.restriction, mass.basis, ct.VECTOR_ACTIVE)
    f = jax.jit(ct.embed(op, symmetric=True))
    x = jnp.ones(mass.lsize)
    with pytest.raises(ct.CeedAccessError, match=r"qdata.*has no data"):
        f(x)
    empty.set_array(mass.data)
    np.testing.assert_allclose(f(x), mass.matrix @ x, atol=1e-14)


class TestPoison:
    def build(self, ceed):
        qf = ct.QFunction.from_source(
            ceed, SOURCE, "failing", [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_INTERP)]
        )
        return Mass1D(ceed, qfunction=qf)

    def test_the_operator_tells(self, ceed):
        mass = self.build(ceed)
        x = jnp.ones(mass.lsize)
        f = jax.jit(ct.embed(mass.op))
        second = ct.embed(mass.op)
        other = jax.jit(lambda u: 2 * second(u))
        assert mass.op.poisoned == ""
        np.testing.assert_allclose(other(x), 2 * mass.matrix @ x, atol=1e-14)
        with pytest.raises(RAISED, match="CeedOperatorApply failed with code"):
            f(1e6 * x).block_until_ready()
        assert mass.op.poisoned.startswith("CeedOperatorApply failed with code")
        # All that uses it says so: other programs, new ones, and libCEED called directly.
        for run in (lambda: f(x), lambda: other(x), lambda: ct.embed(mass.op)(x)):
            with pytest.raises(RAISED, match="Poisoned by: CeedOperatorApply failed"):
                jax.block_until_ready(run())
        with pytest.raises(ct.CeedAccessError, match="Poisoned by"):
            mass.op.apply(vector_of(ceed, x), ceed.Vector(mass.lsize))

    def test_its_vectors_can_be_used(self, ceed):
        mass = self.build(ceed)
        with pytest.raises(RAISED, match="failed"):
            jax.jit(ct.embed(mass.op))(jnp.full(mass.lsize, 1e6)).block_until_ready()
        mass.qdata.set_value(3.0)
        assert mass.qdata.norm(ct.NORM_MAX) == 3

    def test_one_that_python_poisoned(self, ceed):
        mass = self.build(ceed)
        x = jnp.ones(mass.lsize)
        f = jax.jit(ct.embed(mass.op))
        f(x)
        with pytest.raises(ct.CeedError):
            mass.op.apply(vector_of(ceed, np.full(mass.lsize, 1e6)), ceed.Vector(mass.lsize))
        with pytest.raises(RAISED, match=r"failing.*Poisoned by: CeedOperatorApply failed"):
            f(x).block_until_ready()

    def test_a_part_of_a_sum(self, ceed):
        mass = self.build(ceed)
        composite = ceed.CompositeOperator()
        composite.add_sub(Mass1D(ceed).op)
        composite.add_sub(mass.op)
        x = jnp.ones(mass.lsize)
        f = jax.jit(ct.embed(composite))
        np.testing.assert_allclose(f(x), 2 * mass.matrix @ x, atol=1e-14)
        with pytest.raises(ct.CeedError):
            mass.op.apply(vector_of(ceed, np.full(mass.lsize, 1e6)), ceed.Vector(mass.lsize))
        with pytest.raises(RAISED, match="Poisoned by: CeedOperatorApply failed"):
            f(x).block_until_ready()

    def test_a_qfunction(self, ceed):
        mass = self.build(ceed)
        x = jnp.ones(mass.lsize)
        f = jax.jit(ct.embed(mass.op))
        f(x)
        with pytest.raises(ct.CeedError):
            mass.op.qfunction.apply(1, [vector_of(ceed, [1e6]), vector_of(ceed, [1.0])], [ceed.Vector(1)])
        assert mass.op.qfunction.poisoned
        with pytest.raises(RAISED, match="Poisoned by"):
            f(x).block_until_ready()


@pytest.mark.skipif("package" not in load().origin, reason="needs the libceed package")
@pytest.mark.parametrize("kind", ["single", "composite"])
def test_operators_of_other_code(kind):
    """Their passive fields are libCEED's business as well: asked before the call."""
    check_python(f"""
        import jax, jax.numpy as jnp, libceed, numpy as np
        jax.config.update("jax_enable_x64", True)
        import ceedtap as ct
        from ceed_helpers import BACKENDS, vector_of
        for resource in BACKENDS:
            ceed = libceed.Ceed(resource)
            rows = ceed.ElemRestriction(1, 3, 1, 1, 3, np.arange(3, dtype=np.int32))
            data, v = ceed.Vector(3), ceed.Vector(3)
            basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 3, libceed.GAUSS_LOBATTO)
            strided = ceed.StridedElemRestriction(1, 3, 1, 3, np.array([1, 3, 3], dtype=np.int32))
            op = ceed.Operator(ceed.QFunctionByName("MassApply"))
            op.set_field("u", rows, basis, libceed.VECTOR_ACTIVE)
            op.set_field("qdata", strided, libceed.BASIS_NONE if hasattr(libceed, "BASIS_NONE")
                         else libceed.BASIS_COLLOCATED, data)
            op.set_field("v", rows, basis, libceed.VECTOR_ACTIVE)
            if {kind!r} == "composite":
                whole = ceed.CompositeOperator()
                whole.add_sub(op)
            else:
                whole = op
            ours = ct.Operator.wrap(whole)
            f = ct.embed(ours, symmetric=True)
            compiled = jax.jit(lambda x: f(x))
            x = jnp.ones(3)
            def refused(run, text):
                try:
                    jax.block_until_ready(run())
                except (ct.CeedError, jax.errors.JaxRuntimeError, ValueError) as error:
                    assert text in str(error), error
                else:
                    raise AssertionError("accepted")
            u, w = vector_of(ours.ceed, np.ones(3)), ours.ceed.Vector(3)
            refused(lambda: compiled(x), "has no data")
            refused(lambda: ours.apply(u, w), "has no data")
            data.set_array(np.array([1.0, 2.0, 3.0]))
            ours.apply(u, w)
            np.testing.assert_allclose(w.to_numpy(), [1, 2, 3], rtol=1e-13)
            np.testing.assert_allclose(compiled(x), [1, 2, 3], rtol=1e-13)
            data.get_array()
            refused(lambda: compiled(x), "locked")
            refused(lambda: f(x), "locked")
            refused(lambda: ours.apply(u, w), "locked")
            data.restore_array()
            assert ours.poisoned == ""
            np.testing.assert_allclose(compiled(x), [1, 2, 3], rtol=1e-13)
    """)


def test_programs_keep_what_they_check(one):
    """The names, conditions and texts live as long as the program."""
    mass = Mass1D(one)
    x = jnp.ones(mass.lsize)
    wanted = mass.matrix @ np.ones(mass.lsize)
    compiled = jax.jit(ct.embed(mass.op, symmetric=True)).lower(x).compile()
    del mass
    gc.collect()
    trash = [np.full(2000, 255, np.uint8) for _ in range(2000)]
    for _ in range(10):
        np.testing.assert_allclose(compiled(x), wanted, atol=1e-14)
    assert len(trash) == 2000
