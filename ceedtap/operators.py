"""libCEED operators that exist already, as JAX functions: `embed`."""

from __future__ import annotations

from typing import Any

import jax

from ceedtap.apply import Application, Connection, Mask, apply_p, check_array
from ceedtap.ceed import CompositeOperator, Operator


class _Embedding(Application):
    """An operator with one active input and one active output."""

    def __init__(self, op: Operator | CompositeOperator, linear: bool) -> None:
        self.op = op
        self.name = op.name
        n, m = op.active_lengths
        self.in_shapes, self.out_shapes = ((n,),), ((m,),)
        self.dtype = op.ceed.library.scalar_dtype
        self.linear = frozenset({0}) if linear else frozenset()
        self.transposed: _Embedding | None = None

    def connect(self) -> Connection:
        u, v = (self.op.ceed.Vector(length) for length in self.op.active_lengths)
        return Connection(self.op, [u], [v], (u, v))

    def jvp(self, mask: Mask) -> tuple[Application, Mask]:
        raise TypeError(
            f"the derivative of the embedded operator {self!r} is not known; say embed(op, linear=True) when it is "
            "linear, or embed(op, symmetric=True) / embed(op, transpose=...) to have gradients as well"
        )

    def transpose(self, mask: Mask) -> tuple[Application, Mask]:
        if self.transposed is None:
            raise TypeError(
                f"gradients through the embedded operator {self!r} need its transpose; say embed(op, symmetric=True) "
                "or embed(op, transpose=...)"
            )
        return self.transposed, (True,)


# -- public functions ------------------------------------------------------------------------------------------------


class EmbeddedOperator:
    """A libCEED operator as a JAX function of its active input; made by :func:`embed`."""

    def __init__(self, application: _Embedding) -> None:
        self._application = application
        # Through jit even when called eagerly: the compiled call lives as long as this object, in no global cache.
        self._call = jax.jit(lambda u: apply_p.bind(u, op=application)[0], inline=True)

    @property
    def operator(self) -> Operator | CompositeOperator:
        """The libCEED operator."""
        return self._application.op

    @property
    def input_length(self) -> int:
        """Length of the active input L-vector."""
        return self._application.in_shapes[0][0]

    @property
    def output_length(self) -> int:
        """Length of the active output L-vector."""
        return self._application.out_shapes[0][0]

    def __call__(self, u: jax.Array) -> jax.Array:
        """Applies the operator.

        Args:
            u: active input, an L-vector of shape (input_length,) in libCEED's scalar type.

        Returns:
            the active output, of shape (output_length,).

        Raises:
            TypeError: another element type.
            ValueError: another shape.
            ceedtap.CeedError: what :meth:`ceedtap.Operator.apply` refuses as well: a passive field or a context has no
                data or is locked, or an earlier error has left the operator locked. A program that is compiled already
                finds that out when it runs, and JAX raises an error with the same text; nothing is computed, and it
                runs again when the data is there.
            jax.errors.JaxRuntimeError: libCEED reported an error, whose text it has; also ValueError, which JAX makes
                of it on its fast path.
        """
        self.operator.check_applicable()
        return self._call(
            check_array("the operator's input", u, self._application.in_shapes[0], self._application.dtype)
        )

    def __repr__(self) -> str:
        return f"EmbeddedOperator({self.operator!r})"


def embed(op: Any, *, linear: bool = False, symmetric: bool = False, transpose: Any = None) -> EmbeddedOperator:
    """Makes a JAX function of a libCEED operator: active input -> active output.

    The function works in `jax.jit`, `jax.lax.scan`, `while_loop`, `cond` and `jax.vmap` (one call for the whole batch).
    It runs inside the compiled program, on XLA's own buffers. Passive fields keep the vectors that they have; they must
    not be changed while a program runs.

    Args:
        op: a :class:`ceedtap.Operator`, or an operator of the `libceed` package, with one active input and one active
            output vector.
        linear: the operator is linear in its active input. Needed for `jax.jvp` and implied by the next two.
        symmetric: the operator is its own transpose, so `jax.grad` and `jax.linear_transpose` work.
        transpose: the operator, or embedded operator, that is its transpose.

    Raises:
        ceedtap.CeedError: the operator is incomplete, or has no active input or output.
        TypeError: `op` is no operator.
        ValueError: `transpose` does not fit, or is given together with `symmetric`.

    The mass matrix of one line element [-1, 1], and the gradient of ``u' M u / 2``, which is ``M u``:

    >>> import ceedtap as ct, jax, jax.numpy as jnp, numpy as np
    >>> jax.config.update("jax_enable_x64", True)
    >>> ceed = ct.Ceed("/cpu/self")
    >>> nodes = ceed.ElemRestriction(1, 2, 1, 1, 2, np.arange(2))
    >>> points = ceed.StridedElemRestriction(1, 2, 1, 2, [1, 2, 2])
    >>> basis = ceed.BasisTensorH1Lagrange(1, 1, 2, 2, ct.GAUSS)
    >>> weights = ceed.Vector(2)
    >>> weights.set_value(1.0)
    >>> op = ceed.Operator(ceed.QFunctionByName("MassApply"))
    >>> op.set_field("u", nodes, basis, ct.VECTOR_ACTIVE)
    >>> op.set_field("qdata", points, ct.BASIS_NONE, weights)
    >>> op.set_field("v", nodes, basis, ct.VECTOR_ACTIVE)
    >>> mass = ct.embed(op, symmetric=True)
    >>> jax.jit(mass)(jnp.ones(2)).round(12)
    Array([1., 1.], dtype=float64)
    >>> jax.grad(lambda u: u @ mass(u) / 2)(jnp.array([1.0, 0.0])) * 3
    Array([2., 1.], dtype=float64)
    """
    if symmetric and transpose is not None:
        raise ValueError("a symmetric operator is its own transpose: give either symmetric=True or transpose=")
    application = _Embedding(_ready(op), linear or symmetric or transpose is not None)
    if symmetric:
        if application.in_shapes != application.out_shapes:
            raise ValueError(f"a symmetric operator has inputs and outputs of one length, got {application!r}")
        application.transposed = application
    elif transpose is not None:
        given = isinstance(transpose, EmbeddedOperator)
        other = transpose._application if given else _Embedding(_ready(transpose), True)
        if (other.in_shapes, other.out_shapes) != (application.out_shapes, application.in_shapes):
            raise ValueError(f"the transpose of {application!r} has the lengths exchanged, got {other!r}")
        application.transposed = other
        if other.transposed is None:
            other.linear, other.transposed = application.linear, application
    return EmbeddedOperator(application)


def _ready(op: Any) -> Operator | CompositeOperator:
    op = op if isinstance(op, (Operator, CompositeOperator)) else Operator.wrap(op)
    op.check()
    if 0 in op.active_lengths:
        raise ValueError(
            f"embed needs an operator with one active input and one active output vector; {op!r} has active lengths "
            f"{op.active_lengths}. Set a field's vector to VECTOR_ACTIVE."
        )
    return op
