"""libCEED operators as JAX functions: the primitive and its rules; `embed`.

A compiled program calls the native handler, which points the operator's vectors at XLA's buffers, applies it, and takes
the buffers back. It refers to the operator by a key. The objects behind a key live until Python and every program that
was compiled with it have let go of it.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.ceed import CompositeOperator, Operator
from ceedtap.ceed_ffi import Library
from ceedtap.native import ffi, lib

# -- primitive -------------------------------------------------------------------------------------------------------

apply_p = jax_compat.Primitive("ceed_operator_apply")
apply_p.multiple_results = True

# -- handles ---------------------------------------------------------------------------------------------------------

# Keys start at a random place, so that a program from another process does not find an operator of this one by chance.
_keys = itertools.count(secrets.randbits(63))
_alive: dict[int, Any] = {}  # by key: what the native side points to


def _reap() -> None:
    """Lets go of what no program refers to any more."""
    keys, payloads = ffi.new("uint64_t[64]"), ffi.new("void *[64]")
    while n := lib.ct_registry_reap(lib.ct_operators(), keys, payloads, 64):
        for key in keys[0:n]:
            _alive.pop(key, None)


def _release(key: int) -> None:
    lib.ct_registry_unref(lib.ct_operators(), key)
    _reap()


@functools.cache
def _native_api(library: Library) -> Any:
    api = ffi.new("ct_ceed_api *")
    for field, symbol in {
        "vector_set_array": "CeedVectorSetArray",
        "vector_take_array": "CeedVectorTakeArray",
        "operator_apply": "CeedOperatorApply",
        "get_error_message": "CeedGetErrorMessage",
        "reset_error_message": "CeedResetErrorMessage",
    }.items():
        ctype = next(member.type for name, member in ffi.typeof("ct_ceed_api").fields if name == field)
        setattr(api, field, ffi.cast(ctype, library.address(symbol)))
    api.request_immediate = ffi.cast("void **", _address(library, library.lib.CEED_REQUEST_IMMEDIATE))
    api.scalar_size = library.scalar_dtype.itemsize
    return api


def _address(library: Library, pointer: Any) -> int:
    return int(library.ffi.cast("uintptr_t", pointer))


class _Handle:
    """What programs hold of an embedded operator; a parameter of the primitive, compared by identity."""

    def __init__(self, op: Operator | CompositeOperator, linear: bool) -> None:
        library = op.ceed.library
        self.op = op
        self.lengths = op.active_lengths
        self.dtype = library.scalar_dtype
        self.linear = linear
        self.transpose: _Handle | None = None
        self.key = next(_keys) % 2**64

        def pointer(value: Any) -> Any:
            return ffi.cast("void *", _address(library, value))

        vectors = [op.ceed.Vector(length) for length in self.lengths]
        pointers = ffi.new("void *[]", [pointer(vector.pointer) for vector in vectors])
        lengths = ffi.new("int64_t[]", list(self.lengths))
        entry = ffi.new("ct_operator *")
        entry.api = _native_api(library)
        entry.lock = op.ceed.lock.pointer
        entry.ceed = pointer(op.ceed.pointer)
        entry.op = pointer(op.pointer)
        entry.active_in, entry.active_out = pointers[0], pointers[1]
        entry.num_in = entry.num_out = 1
        entry.vectors, entry.lengths = pointers, lengths
        _reap()
        _alive[self.key] = (op, vectors, pointers, lengths, entry)
        if lib.ct_registry_add(lib.ct_operators(), self.key, entry):
            del _alive[self.key]
            raise MemoryError("ceedtap: no memory for an embedded operator")
        weakref.finalize(self, _release, self.key).atexit = False

    def __repr__(self) -> str:
        return f"<{self.op.name or 'operator'} {self.lengths[0]} -> {self.lengths[1]}>"


# -- public functions ------------------------------------------------------------------------------------------------


class EmbeddedOperator:
    """A libCEED operator as a JAX function of its active input; made by :func:`embed`."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle
        # Through jit even when called eagerly: the compiled call lives as long as this object, in no global cache.
        self._call = jax.jit(lambda u: apply_p.bind(u, handle=handle)[0], inline=True)

    @property
    def operator(self) -> Operator | CompositeOperator:
        """The libCEED operator."""
        return self._handle.op

    @property
    def input_length(self) -> int:
        """Length of the active input L-vector."""
        return self._handle.lengths[0]

    @property
    def output_length(self) -> int:
        """Length of the active output L-vector."""
        return self._handle.lengths[1]

    def __call__(self, u: jax.Array) -> jax.Array:
        """Applies the operator.

        Args:
            u: active input, an L-vector of shape (input_length,) in libCEED's scalar type.

        Returns:
            the active output, of shape (output_length,).

        Raises:
            TypeError: another element type.
            ValueError: another shape.
            jax.errors.JaxRuntimeError: libCEED reported an error, whose text it has; also ValueError, which JAX makes
                of it on its fast path.
        """
        u = _checked(u, self._handle)
        return self._call(u)

    def __repr__(self) -> str:
        return f"EmbeddedOperator({self.operator!r})"


def _checked(u: Any, handle: _Handle) -> Any:
    given = getattr(u, "dtype", None)
    if given is not None and given != handle.dtype:
        raise TypeError(
            f"libCEED computes in {handle.dtype} here, the input of the operator is {given}; convert it with "
            f"u.astype('{handle.dtype}')" + _x64_hint(handle.dtype)
        )
    u = jnp.asarray(u)
    if u.dtype != handle.dtype:
        raise TypeError(
            f"libCEED computes in {handle.dtype} here, JAX made {u.dtype} of the operator's input"
            + _x64_hint(handle.dtype)
        )
    if u.shape != (handle.lengths[0],):
        raise ValueError(
            f"the operator's input is an L-vector of shape ({handle.lengths[0]},), got {u.shape}; reshape it, or use "
            "jax.vmap for a batch of L-vectors"
        )
    return u


def _x64_hint(dtype: np.dtype) -> str:
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        return ", after jax.config.update('jax_enable_x64', True)"
    return ""


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
    handle = _Handle(_ready(op), linear or symmetric or transpose is not None)
    if symmetric:
        if handle.lengths[0] != handle.lengths[1]:
            raise ValueError(f"a symmetric operator has inputs and outputs of one length, got {handle!r}")
        handle.transpose = handle
    elif transpose is not None:
        other = transpose._handle if isinstance(transpose, EmbeddedOperator) else _Handle(_ready(transpose), True)
        if other.lengths != handle.lengths[::-1]:
            raise ValueError(f"the transpose of {handle!r} has the lengths exchanged, got {other!r}")
        handle.transpose = other
        if other.transpose is None:
            other.linear, other.transpose = True, handle
    return EmbeddedOperator(handle)


def _ready(op: Any) -> Operator | CompositeOperator:
    op = op if isinstance(op, (Operator, CompositeOperator)) else Operator.wrap(op)
    op.check()
    if 0 in op.active_lengths:
        raise ValueError(
            f"embed needs an operator with one active input and one active output vector; {op!r} has active lengths "
            f"{op.active_lengths}. Set a field's vector to VECTOR_ACTIVE."
        )
    return op


# -- lowering and evaluation -----------------------------------------------------------------------------------------

_lower = jax_compat.lower_ffi("ceedtap_operator")


def _lowering(ctx: jax_compat.LoweringRuleContext, *operands: Any, handle: _Handle) -> Any:
    # Until XLA has instantiated the call; from then on the executable holds the key itself.
    jax_compat.add_keepalive(ctx, handle)
    return _lower(ctx, *operands, operator=np.uint64(handle.key)).results


jax_compat.register_lowering(apply_p, _lowering, platform="cpu")
apply_p.def_impl(functools.partial(jax_compat.apply_primitive, apply_p))

# -- abstract evaluation ---------------------------------------------------------------------------------------------


@apply_p.def_abstract_eval
def _abstract_eval(u: Any, *, handle: _Handle) -> list[Any]:
    return [jax_compat.AbstractValue((*u.shape[:-1], handle.lengths[1]), u.dtype)]


# -- batching --------------------------------------------------------------------------------------------------------


def _batching(args: Any, dims: Any, *, handle: _Handle) -> tuple[list[Any], list[int]]:
    """The batch goes in front; the handler runs over everything before the last axis."""
    return apply_p.bind(jnp.moveaxis(args[0], dims[0], 0), handle=handle), [0]


jax_compat.primitive_batchers[apply_p] = _batching

# -- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, handle: _Handle) -> tuple[list[Any], list[Any]]:
    if not handle.linear:
        raise TypeError(
            f"the derivative of the embedded operator {handle!r} is not known; say embed(op, linear=True) when it is "
            "linear, or embed(op, symmetric=True) / embed(op, transpose=...) to have gradients as well"
        )
    # JAX calls the rule only when there is a tangent, so with one input it is not a symbolic zero.
    return apply_p.bind(*primals, handle=handle), apply_p.bind(*tangents, handle=handle)


jax_compat.primitive_jvps[apply_p] = _jvp


def _transpose(cotangents: Any, u: Any, *, handle: _Handle) -> list[Any]:
    if handle.transpose is None:
        raise TypeError(
            f"gradients through the embedded operator {handle!r} need its transpose; say embed(op, symmetric=True) or "
            "embed(op, transpose=...)"
        )
    (cotangent,) = cotangents
    if type(cotangent) is jax_compat.Zero:
        return [jax_compat.Zero(u.aval)]
    return apply_p.bind(cotangent, handle=handle.transpose)


jax_compat.primitive_transposes[apply_p] = _transpose
