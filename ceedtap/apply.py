"""The primitive that applies libCEED operators in compiled programs, and its rules.

A compiled program calls the native handler, which points the operator's vectors at XLA's buffers, applies it, and takes
the buffers back. It refers to the operator by a key. The objects behind a key live until Python and every program that
was compiled with it have let go of it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import secrets
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import jax_compat
from ceedtap.ceed import CompositeOperator, Operator, Vector
from ceedtap.ceed_ffi import Library
from ceedtap.ceed_qfunction import _QFunction
from ceedtap.consumer import Consumer
from ceedtap.native import ffi, lib
from ceedtap.plain_arrays import check_plain
from ceedtap.toolchain import CompilerNotFound
from ceedtap.unique import Unique

Mask = tuple[bool, ...]

# -- primitive -------------------------------------------------------------------------------------------------------

apply_p = jax_compat.UniformPrimitive("ceed_operator_apply")
apply_p.multiple_results = True

# -- what programs hold ----------------------------------------------------------------------------------------------

# Keys start at a random place, so that a program from another process does not find an operator of this one by chance.
_keys = itertools.count(secrets.randbits(63))


class Registry:
    """Objects that compiled programs refer to by keys, of one kind."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self._alive: dict[int, Any] = {}  # what the native side points to

    def __len__(self) -> int:
        return int(lib.ct_registry_size(self.native))

    def enter(self, owner: object, payload: Any, kept: Any) -> int:
        """A key for `payload`; it and `kept` live as long as `owner` or a program that has the key."""
        self.reap()
        key = next(_keys) % 2**64
        self._alive[key] = payload, kept
        if lib.ct_registry_add(self.native, key, payload):
            del self._alive[key]
            raise MemoryError("ceedtap: no memory for a key")
        weakref.finalize(owner, self._release, key).atexit = False
        return key

    def _release(self, key: int) -> None:
        lib.ct_registry_unref(self.native, key)
        self.reap()

    def reap(self) -> None:
        """Lets go of what nothing refers to any more."""
        keys, payloads = ffi.new("uint64_t[64]"), ffi.new("void *[64]")
        while n := lib.ct_registry_reap(self.native, keys, payloads, 64):
            for key in keys[0:n]:
                self._alive.pop(key, None)


OPERATORS = Registry(lib.ct_operators())


@functools.cache
def _native_api(library: Library) -> Any:
    api = ffi.new("ct_ceed_api *")
    for field, symbol in {
        "vector_get_state": "CeedVectorGetState",
        "vector_has_valid_array": "CeedVectorHasValidArray",
        "vector_get_array_write": "CeedVectorGetArrayWrite",
        "vector_restore_array": "CeedVectorRestoreArray",
        "qfunction_get_inner_context": "CeedQFunctionGetInnerContext",
        "context_get_state": "CeedQFunctionContextGetState",
        "context_has_valid_data": "CeedQFunctionContextHasValidData",
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


@dataclass(frozen=True)
class Connection:
    """The libCEED side of an application.

    Attributes:
        op: the operator.
        inputs: for each input, the vector that is pointed at it, or the part of a context that it is copied to.
        outputs: the vectors that are pointed at the outputs; None: the number that says whether `op` was applied (1)
            or `idle` (0).
        active: the active input and output vector; None: CEED_VECTOR_NONE.
        idle: the operator that is applied when all of `wanted` are off; None: always `op`.
        wanted: switches.
    """

    op: Operator | CompositeOperator
    inputs: Sequence[Vector | np.ndarray]
    outputs: Sequence[Vector | None]
    active: tuple[Vector | None, Vector | None]
    idle: Operator | CompositeOperator | None = None
    wanted: Sequence[Switch] = ()


class Switch:
    """Whether somebody listens to a consumer, or records what it gets, as native code sees it."""

    def __init__(self, consumer: Consumer) -> None:
        self.flag = ffi.new("uint8_t *")
        self._consumer = consumer
        consumer.routes.add(self)
        self.enable(consumer.enabled)

    def enable(self, enabled: bool) -> None:
        self.flag[0] = enabled or any(getattr(route, "tees", ()) for route in list(self._consumer.routes))


class Application(Unique):
    """What programs hold of an operator; a parameter of the primitive, compared by identity.

    Attributes:
        name: for messages.
        in_shapes, out_shapes: of the arrays in a program, batches apart.
        linear: numbers of the inputs in which, all together, the operator is linear.
        dtype: of all arrays.
        num_tapped: how many of the last outputs are not results, but there to be tapped (:meth:`emit`).
    """

    name: str
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    linear: frozenset[int]
    dtype: np.dtype
    num_tapped: int = 0

    @property
    def num_results(self) -> int:
        """How many of the outputs are results."""
        return len(self.out_shapes) - self.num_tapped

    def connect(self) -> Connection:
        """Makes the libCEED side; called once, when a program is lowered."""
        raise NotImplementedError

    def call(self, ctx: jax_compat.LoweringRuleContext, *operands: Any) -> Any:
        """The call of the native handler in a compiled program.

        Raises:
            CompilerNotFound: there is code to be compiled, and no compiler.
        """
        return _lower(ctx, *operands, operator=np.uint64(self.key)).results

    def evaluate(self, *inputs: Any) -> list[Any]:
        """The same in plain JAX, where libCEED cannot be used."""
        raise NotImplementedError(f"{self!r} runs on CPU only: libCEED alone knows what it does")

    def jvp(self, mask: Mask) -> tuple[Application, Mask]:
        """The derivative: of the inputs and one tangent for each input of the mask. The second mask says which of all
        those it takes."""
        raise TypeError(f"the derivative of {self!r} is not known")

    def derivatives(self, mask: Mask) -> list[tuple[Application, Mask, Mask]]:
        """What :meth:`jvp` gives, as a sum where one operator has no room for it. The third mask says which outputs a
        term has."""
        return [(*self.jvp(mask), (True,) * self.num_results)]

    def transpose(self, mask: Mask) -> tuple[Application, Mask]:
        """The transpose: of the inputs in which the operator is not linear and a cotangent for each output. The second
        mask says which of those it takes."""
        raise TypeError(f"the transpose of {self!r} is not known")

    def select(self, mask: Mask) -> Application | None:
        """The operator with some of its outputs only; None where that is not possible, as with a part of its taps."""
        results, tapped = mask[: self.num_results], mask[self.num_results :]
        if all(tapped):
            return self.with_results(results)
        return None if any(tapped) else self.silent().with_results(results)

    def with_results(self, mask: Mask) -> Application | None:
        """The operator with some of its results only, and with all of its taps; None where that is not possible."""
        return None

    def silent(self) -> Application:
        """The operator without taps."""
        return self

    def emit(self, tapped: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Taps the last outputs."""

    def batched(self) -> Application:
        """The operator whose derivatives are those of a batch."""
        return self

    @functools.cached_property
    def _derived(self) -> dict[Any, Any]:
        return {}

    def derived(self, key: Any, make: Callable[[], Any]) -> Any:
        """What is made from this application once: programs that are traced again find the same."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def __repr__(self) -> str:
        shapes = " -> ".join(", ".join(map(str, side)) for side in (self.in_shapes, self.out_shapes))
        return f"<{self.name or 'operator'} {shapes}>"

    @functools.cached_property
    def key(self) -> int:
        """The key that programs refer to the operator by."""
        connection = self.connect()
        ceed = connection.op.ceed

        def pointer(value: Any) -> Any:
            return ffi.cast("void *", _address(ceed.library, value))

        ends = (*connection.inputs, *connection.outputs)
        vectors = [pointer(end.pointer) if isinstance(end, Vector) else ffi.NULL for end in ends]
        contexts = [ffi.cast("void *", end.ctypes.data) if isinstance(end, np.ndarray) else ffi.NULL for end in ends]
        entry = ffi.new("ct_operator *")
        kept = (
            ffi.new("void *[]", vectors or 1),
            ffi.new("void *[]", contexts or 1),
            ffi.new("int64_t[]", [1 if end is None else len(end) for end in ends] or 1),
            ffi.new("uint8_t *[]", [switch.flag for switch in connection.wanted] or 1),
        )
        entry.vectors, entry.contexts, entry.lengths, entry.wanted = kept
        entry.num_wanted = len(connection.wanted)
        entry.api = _native_api(ceed.library)
        entry.lock = ceed.lock.pointer
        entry.ceed = pointer(ceed.pointer)
        entry.op = pointer(connection.op.pointer)
        entry.idle_op = ffi.NULL if connection.idle is None else pointer(connection.idle.pointer)
        none = ceed.library.lib.CEED_VECTOR_NONE
        entry.active_in, entry.active_out = (pointer(none if v is None else v.pointer) for v in connection.active)
        entry.num_in, entry.num_out = len(connection.inputs), len(connection.outputs)
        conditions = _conditions(connection, pointer)
        array = ffi.new("ct_condition[]", conditions or 1)
        entry.conditions, entry.num_conditions = array, len(conditions)
        entry.poison = connection.op._native_poison
        entry.idle_poison = (connection.idle or connection.op)._native_poison
        return OPERATORS.enter(self, entry, (connection, kept, conditions, array))


def _conditions(connection: Connection, pointer: Callable[[Any], Any]) -> list[tuple[int, Any, Any, Any]]:
    """What the handler checks before each call: what can change, or break, when nobody traces a program."""
    conditions = []

    def add(kind: int, native: Any, name: str, take_status: Any = None) -> None:
        status = ffi.NULL if take_status is None else ctypes.cast(take_status, ctypes.c_void_p).value
        conditions.append((kind, native, ffi.new("char[]", name.encode()), ffi.cast("int(*)(void)", status)))

    ends = [end._access for end in (*connection.inputs, *connection.outputs) if isinstance(end, Vector)]
    for op in filter(None, (connection.op, connection.idle)):
        for part in op.parts():
            add(lib.CT_USABLE, ffi.cast("void *", part._native_poison), repr(part), getattr(part, "take_status", None))
            if isinstance(part, _QFunction):
                add(lib.CT_CONTEXT, pointer(part.pointer), f"the context of {part!r}")
        for kind, vectors in zip((lib.CT_READABLE, lib.CT_WRITABLE), op.passive_vectors, strict=True):
            for name, vector in vectors:
                if not any(vector._access is end for end in ends):  # those are pointed at the program's arrays
                    add(kind, pointer(vector.pointer), f"{name}, {vector!r}")
                    vector._users.append(weakref.ref(op))
    return conditions


def apply(op: Application, *inputs: Any) -> list[Any]:
    """The results of an operator in a program, which emits what it taps."""
    outs = apply_p.bind(*inputs, op=op)
    if op.num_tapped:
        op.emit(outs[op.num_results :], inputs)
    return list(outs[: op.num_results])


# -- lowering and evaluation -----------------------------------------------------------------------------------------

_lower = jax_compat.lower_ffi("ceedtap_operator")


def lower_in_jax(
    ctx: jax_compat.LoweringRuleContext, evaluate: Callable[..., list[Any]], op: Application, operands: Sequence[Any]
) -> Any:
    """What an operator is in a compiled program, as a function of JAX of arrays without batches."""

    def with_batches(*inputs: Any) -> list[Any]:
        depths = [x.ndim - len(shape) for x, shape in zip(inputs, op.in_shapes, strict=True)]
        function = evaluate
        for _ in range(max(depths, default=0)):
            function = jax.vmap(function, [0 if depth else None for depth in depths])
        return function(*inputs)

    return jax_compat.lower_fun(with_batches, ctx, operands)


def _jax_lowering(ctx: jax_compat.LoweringRuleContext, *operands: Any, op: Application) -> Any:
    return lower_in_jax(ctx, op.evaluate, op, operands)


@functools.cache
def _warn_without_compiler(reason: str) -> None:
    warnings.warn(f"point functions run in plain JAX, which is slower: {reason}", stacklevel=2)


def _lowering(ctx: jax_compat.LoweringRuleContext, *operands: Any, op: Application) -> Any:
    try:
        results = op.call(ctx, *operands)
    except CompilerNotFound as error:
        _warn_without_compiler(str(error))
        return _jax_lowering(ctx, *operands, op=op)
    # Until XLA has instantiated the call; from then on the executable holds the key itself.
    jax_compat.add_keepalive(ctx, op)
    return results


jax_compat.register_lowering(apply_p, _lowering, platform="cpu")
jax_compat.register_lowering(apply_p, _jax_lowering)
apply_p.def_impl(functools.partial(jax_compat.apply_primitive, apply_p))

# -- abstract evaluation ---------------------------------------------------------------------------------------------


def _batch_shape(op: Application, avals: Sequence[Any]) -> tuple[int, ...]:
    """The leading axes that batching has added; inputs without them serve all lanes."""
    return max(
        (a.shape[: len(a.shape) - len(s)] for a, s in zip(avals, op.in_shapes, strict=True)), key=len, default=()
    )


@apply_p.def_abstract_eval
def _abstract_eval(*avals: Any, op: Application) -> list[Any]:
    batch = _batch_shape(op, avals)
    return [jax_compat.result_aval(apply_p, (*batch, *shape), op.dtype, avals) for shape in op.out_shapes]


# -- batching --------------------------------------------------------------------------------------------------------


def _batching(args: Any, dims: Any, *, op: Application) -> tuple[list[Any], list[int]]:
    """The batch goes in front; the handler runs over everything before the axes that the operator knows."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    # What batch shape there was before; an input that has a part of the batch must get all of it.
    before = max(
        (a.shape[(d is not None) : a.ndim - len(s)] for a, d, s in zip(moved, dims, op.in_shapes, strict=True)), key=len
    )
    full = []
    for a, d, shape in zip(moved, dims, op.in_shapes, strict=True):
        if d is None and a.ndim == len(shape):
            full.append(a)
            continue
        a = a if d is not None else a[None]
        a = a.reshape(a.shape[0], *(a.shape[1 : a.ndim - len(shape)] or (1,) * len(before)), *shape)
        full.append(jnp.broadcast_to(a, (size, *before, *shape)))
    return apply_p.bind(*full, op=op.batched()), [0] * len(op.out_shapes)


jax_compat.primitive_batchers[apply_p] = _batching

# -- derivatives -----------------------------------------------------------------------------------------------------


def _jvp(primals: Any, tangents: Any, *, op: Application) -> tuple[list[Any], list[Any]]:
    outs = apply_p.bind(*primals, op=op)
    mask = tuple(type(t) is not jax_compat.Zero for t in tangents)
    # Nothing but taps can use what is there to be tapped, and the derivative has taps of its own.
    count = op.num_results
    zeros = [jax_compat.zero_tangent(out) for out in outs[count:]]
    if not op.num_tapped and all(i in op.linear for i, moved in enumerate(mask) if moved):
        directions = [
            (t if moved else jnp.zeros_like(p)) if i in op.linear else p
            for i, (p, t, moved) in enumerate(zip(primals, tangents, mask, strict=True))
        ]
        return outs, apply_p.bind(*directions, op=op)
    everything = [*primals, *(t for t, moved in zip(tangents, mask, strict=True) if moved)]
    total: list[Any] = [None] * count
    for derivative, takes, has in op.derivatives(mask):
        terms = iter(apply(derivative, *(x for x, wanted in zip(everything, takes, strict=True) if wanted)))
        total = [
            (next(terms) if x is None else x + next(terms)) if wanted else x
            for x, wanted in zip(total, has, strict=True)
        ]
    # A derivative that depends on no batched input has no batch yet.
    return outs, [
        jax_compat.zero_tangent(out) if x is None else jnp.broadcast_to(x, out.shape)
        for x, out in zip(total, outs[:count], strict=True)
    ] + zeros


jax_compat.primitive_jvps[apply_p] = _jvp


def _transpose(cotangents: Any, *args: Any, op: Application) -> list[Any]:
    mask = tuple(map(jax_compat.is_undefined_primal, args))
    transposed, takes = op.transpose(mask)
    known = [arg for i, arg in enumerate(args) if i not in op.linear]
    everything = [*known, *map(jax_compat.instantiate_zeros, cotangents[: op.num_results])]
    outs = iter(apply(transposed, *(x for x, wanted in zip(everything, takes, strict=True) if wanted)))
    results: list[Any] = []
    for arg, linear in zip(args, mask, strict=True):
        if not linear:
            results.append(None)
            continue
        out = next(outs)
        # An input that served all lanes of a batch gets the sum of their cotangents.
        extra = out.ndim - len(arg.aval.shape)
        results.append(out.sum(tuple(range(extra))) if extra > 0 else jnp.broadcast_to(out, arg.aval.shape))
    return results


jax_compat.primitive_transposes[apply_p] = _transpose

# -- dead code -------------------------------------------------------------------------------------------------------


def _dce(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Outputs that nobody uses are not computed."""
    eqn = rest[-1]  # from JAX 0.12 on, which inputs are live comes before it
    if not any(used):
        return [False] * len(eqn.invars), None
    op = None if all(used) else eqn.params["op"].select(tuple(used))
    if op is None:
        return [True] * len(eqn.invars), eqn
    return [True] * len(eqn.invars), jax_compat.with_outputs(eqn, used, {"op": op})


jax_compat.set_dce_rule(apply_p, _dce)

# -- inputs ----------------------------------------------------------------------------------------------------------


def check_array(name: str, x: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """`x` as a JAX array of this shape and type; nothing is converted but Python numbers.

    Raises:
        TypeError: another element type.
        ValueError: another shape.
    """
    check_plain(name, x)
    given = getattr(x, "dtype", None)
    hint = ""
    if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        hint = ", after jax.config.update('jax_enable_x64', True)"
    if given is not None and given != dtype:
        raise TypeError(
            f"libCEED computes in {dtype} here, {name} is {given}; convert it with .astype('{dtype}'){hint}"
        )
    array = jnp.asarray(x, None if given is not None else dtype)
    if array.dtype != dtype:
        raise TypeError(f"libCEED computes in {dtype} here, JAX made {array.dtype} of {name}{hint}")
    if array.shape != shape:
        lanes = "; use jax.vmap for a batch" if array.shape[-len(shape) :] == shape and shape else ""
        raise ValueError(f"{name} has the shape {shape}, got {array.shape}{lanes}")
    return array
