"""QFunctions in Python: in every kind of call, with errors, and inside of compiled JAX programs."""

import gc
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ceed_helpers import Mass1D, array_of, check_python, vector_of

import ceedtap
from ceedtap import ceed as ct

IN, OUT = [("u", 1, ct.EVAL_INTERP), ("qdata", 1, ct.EVAL_NONE)], [("v", 1, ct.EVAL_INTERP)]


def mass_function(ctx, q, inputs, outputs):
    outputs[0][:] = inputs[0] * inputs[1]


def python_mass(ceed, f=mass_function, **options):
    qf = ceed.PythonQFunction(f, IN, OUT, **options)
    return Mass1D(ceed, qfunction=qf), qf


class TestCalls:
    def test_everything_an_operator_does(self, ceed):
        mass, qf = python_mass(ceed)
        x = np.random.default_rng(0).random(mass.lsize)
        u, v = vector_of(ceed, x), ceed.Vector(mass.lsize)
        mass.op.apply(u, v)
        mass.op.apply_add(u, v)
        np.testing.assert_allclose(array_of(v), 2 * mass.matrix @ x, rtol=1e-13)
        mass.op.linear_assemble_diagonal(v)
        np.testing.assert_allclose(array_of(v), np.diag(mass.matrix), rtol=1e-13)
        np.testing.assert_allclose(mass.op.to_scipy().toarray(), mass.matrix, atol=1e-14)
        assert qf.calls > 2
        assert qf.error is None
        assert repr(qf) == "<PythonQFunction mass_function (u, qdata) -> (v)>"

    def test_shapes_and_context(self, ceed):
        seen = []

        def f(ctx, q, inputs, outputs):
            seen.append((q, [a.shape for a in inputs], [a.shape for a in outputs], float(ctx["nu"]), int(ctx["n"][1])))
            assert np.isnan(outputs[0]).all()
            outputs[0][:] = ctx["nu"]

        context = ceed.QFunctionContext({"nu": 2.5, "n": [7, 8]})
        qf = ceed.PythonQFunction(
            f, [("u", 3, ct.EVAL_NONE), ("w", 1, ct.EVAL_WEIGHT)], [("v", 2, ct.EVAL_NONE)], context
        )
        v = ceed.Vector(8)
        qf.apply(4, [vector_of(ceed, np.zeros(12)), vector_of(ceed, np.zeros(4))], [v])
        assert seen == [(4, [(3, 4), (1, 4)], [(2, 4)], 2.5, 8)]
        np.testing.assert_array_equal(array_of(v), 2.5)
        context["nu"] = 1.0
        qf.apply(4, [vector_of(ceed, np.zeros(12)), vector_of(ceed, np.zeros(4))], [v])
        assert v.norm(ct.NORM_MAX) == 1

    def test_arrays_can_be_kept(self, ceed):
        """They are copies: libCEED uses its memory again."""
        kept = []

        def f(ctx, q, inputs, outputs):
            kept.append(inputs[0])
            outputs[0][:] = inputs[0] * inputs[1]
            with pytest.raises(ValueError, match="read-only"):
                inputs[0][:] = 0

        mass, _ = python_mass(ceed, f)
        x = np.random.default_rng(0).random(mass.lsize)
        mass.op.apply(vector_of(ceed, x), ceed.Vector(mass.lsize))
        first = [a.copy() for a in kept]
        mass.op.apply(vector_of(ceed, 0 * x), ceed.Vector(mass.lsize))
        del mass, ceed
        gc.collect()
        assert all(np.array_equal(a, b) for a, b in zip(first, kept, strict=False))

    def test_may_use_other_objects(self, ceed):
        """A callback that makes, uses and drops objects of the same Ceed, with the collector running."""
        inner = Mass1D(ceed)
        garbage = []

        def f(ctx, q, inputs, outputs):
            v = ceed.Vector(inner.lsize)
            inner.op.apply(vector_of(ceed, np.ones(inner.lsize)), v)
            cycle = [ceed.Vector(5)]
            cycle.append(cycle)
            garbage.append(weakref.ref(cycle[0]))
            del cycle
            gc.collect()
            outputs[0][:] = inputs[0] * inputs[1]

        mass, _ = python_mass(ceed, f)
        x = np.random.default_rng(0).random(mass.lsize)
        v = ceed.Vector(mass.lsize)
        mass.op.apply(vector_of(ceed, x), v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ x, rtol=1e-13)
        assert all(ref() is None for ref in garbage)

    def test_nothing_is_destroyed_meanwhile(self, one):
        """Not by the lock's own draining either: libCEED is in the middle of a call."""
        done, marks = [], []

        def f(ctx, q, inputs, outputs):
            one.lock.destroy_later(lambda: done.append(1))
            with one.lock:
                pass
            marks.append(len(done))
            outputs[0][:] = inputs[0] * inputs[1]

        mass, _ = python_mass(one, f)
        mass.op.apply(vector_of(one, np.ones(mass.lsize)), one.Vector(mass.lsize))
        assert set(marks) == {0}
        assert done

    def test_freed_with_its_operator(self, one):
        mass, qf = python_mass(one, lambda ctx, q, inputs, outputs: mass_function(ctx, q, inputs, outputs))
        alive = weakref.ref(qf._trampoline.f)
        mass.op.apply(vector_of(one, np.ones(mass.lsize)), one.Vector(mass.lsize))
        del mass, qf
        gc.collect()
        assert alive() is None


class TestErrors:
    def test_raised_after_the_call(self, ceed):
        fail = [True]

        def f(ctx, q, inputs, outputs):
            outputs[0][:] = inputs[0] * inputs[1]
            if fail[0]:
                raise ZeroDivisionError("in the callback")

        mass, qf = python_mass(ceed, f)
        x = np.random.default_rng(0).random(mass.lsize)
        u, v = vector_of(ceed, x), ceed.Vector(mass.lsize)
        for call in (
            lambda: mass.op.apply(u, v),
            lambda: mass.op.linear_assemble_diagonal(v),
            mass.op.linear_assemble_qfunction,
            mass.op.to_scipy,
        ):
            with pytest.raises(ZeroDivisionError, match="in the callback"):
                call()
        assert qf.error is None
        with pytest.raises(ZeroDivisionError):
            mass.op.apply(u, v)
        assert np.isnan(array_of(v)).all()
        # Nothing is locked or poisoned.
        fail[0] = False
        mass.op.apply(u, v)
        np.testing.assert_allclose(array_of(v), mass.matrix @ x, rtol=1e-13)
        assert mass.op.poisoned == ""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
    def test_any_exception(self, one, error):
        def f(ctx, q, inputs, outputs):
            raise error

        mass, _ = python_mass(one, f)
        with pytest.raises(error):
            mass.op.apply(vector_of(one, np.ones(mass.lsize)), one.Vector(mass.lsize))

    def test_what_it_returns(self, one):
        for value in (1, -1, True, "x", np.zeros(3)):
            mass, _ = python_mass(one, lambda ctx, q, inputs, outputs, value=value: value)
            with pytest.raises(TypeError, match="returns None or 0"):
                mass.op.apply(vector_of(one, np.ones(mass.lsize)), one.Vector(mass.lsize))
        mass, _ = python_mass(one, lambda ctx, q, inputs, outputs: 0)
        v = one.Vector(mass.lsize)
        mass.op.apply(vector_of(one, np.ones(mass.lsize)), v)
        assert np.isnan(array_of(v)).all()  # outputs that it does not write

    def test_refusals(self, one):
        with pytest.raises(TypeError, match="f: expected a function"):
            one.PythonQFunction(3)
        with pytest.raises(TypeError, match="QFunctionContext"):
            one.PythonQFunction(mass_function, IN, OUT, context=3)

    def test_in_a_part(self, one):
        def f(ctx, q, inputs, outputs):
            raise RuntimeError("part")

        op = one.CompositeOperator()
        good, (bad, _) = Mass1D(one), python_mass(one, f)
        op.add_sub(good.op)
        op.add_sub(bad.op)
        with pytest.raises(RuntimeError, match="part"):
            op.apply(vector_of(one, np.ones(good.lsize)), one.Vector(good.lsize))


class TestEmbedded:
    def test_value_and_threads(self, ceed):
        """From XLA's threads, while this one works on the same Ceed."""
        mass, _ = python_mass(ceed)
        f = jax.jit(ceedtap.embed(mass.op))
        x = np.random.default_rng(0).random(mass.lsize)
        stop, errors = threading.Event(), []

        def churn():
            try:
                while not stop.is_set():
                    cycle = [ceed.Vector(3)]
                    cycle.append(cycle)
                    gc.collect(0)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for k in range(20):
                np.testing.assert_allclose(f(jnp.asarray(k * x)), k * mass.matrix @ x, atol=1e-12)
        finally:
            stop.set()
            thread.join()
        assert not errors

    def test_exception(self, one, monkeypatch):
        """The program goes on with NaN; the exception is reported and kept."""
        reported = []
        monkeypatch.setattr(sys, "unraisablehook", lambda info: reported.append(info.exc_value))

        def f(ctx, q, inputs, outputs):
            raise ZeroDivisionError("embedded")

        mass, qf = python_mass(one, f)
        y = jax.jit(ceedtap.embed(mass.op))(jnp.ones(mass.lsize))
        assert np.isnan(y).all()
        assert [str(error) for error in reported] == ["embedded"]
        assert qf.clear_error() is reported[0]
        assert qf.error is None

    def test_destruction_waits(self):
        """The native handler holds the lock without a depth that Python counts."""
        check_python("""
            import jax, gc
            jax.config.update("jax_enable_x64", True)
            import jax.numpy as jnp, numpy as np
            import ceedtap
            from ceed_helpers import Mass1D
            from test_callback import IN, OUT, ct
            ceed, done, marks = ct.Ceed("/cpu/self"), [], []
            def f(ctx, q, inputs, outputs):
                ceed.lock.destroy_later(lambda: done.append(1))
                with ceed.lock:
                    ceed.Vector(3)
                marks.append(len(done))
                outputs[0][:] = inputs[0] * inputs[1]
            mass = Mass1D(ceed, qfunction=ceed.PythonQFunction(f, IN, OUT))
            y = jax.jit(ceedtap.embed(mass.op))(jnp.ones(mass.lsize))
            np.testing.assert_allclose(y, mass.matrix @ np.ones(mass.lsize), rtol=1e-13)
            assert set(marks) == {0} and marks
            with ceed.lock:
                pass
            assert len(done) == len(marks)
        """)
