"""Everything that ceedtap needs of JAX beyond its public interface; no other file imports private JAX.

Checked with JAX 0.10.2 and 0.12. When a newer JAX moves something, importing this module raises an ImportError that
names the piece; :func:`broken` lists what is missing without raising, for ``ceedtap doctor``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.experimental
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir as _ir
from jax.extend.mlir.dialects import stablehlo as _stablehlo
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jaxlib import xla_client

from ceedtap.native import ffi, lib

# Effects are allowed in control flow, derivatives and rematerialisation type by type. Without
# `partial_eval_kept_effects` a tap inside `grad(scan(...))` is lost silently, so a missing registry is an error and
# not something to work around.
_EFFECT_REGISTRIES = (
    "lowerable_effects",
    "control_flow_allowed_effects",
    "custom_derivatives_allowed_effects",
    "remat_allowed_effects",
    "partial_eval_kept_effects",
)
_ORDERED_REGISTRIES = ("ordered_effects", "shardable_ordered_effects")
_PRIVATE = {
    "jax._src.effects": _EFFECT_REGISTRIES + _ORDERED_REGISTRIES,
    "jax._src.lax.control_flow.loops": (
        "_scan_known_hoisting",
        "_scan_impl",
        "_scan_partial_eval_custom",
        "_while_lowering",
        "pe",
        "scan_p",
        "while_p",
    ),
    "jax._src.core": (
        "abstract_token",
        "ManualAxisType",
        "auto_insert_reshard",
        "eval_context",
        "get_cur_mesh_sharding",
        "standard_vma_rule",
    ),
    "jax._src.source_info_util": ("user_frames", "user_frame", "user_context", "current_name_stack"),
    "jax._src.ffi": ("build_ffi_lowering_function",),
    "jax._src.debugging": ("debug_callback_p", "debug_print_p"),
    "jax._src.state.types": ("AbstractRef",),
    "jax._src.dispatch": ("RuntimeTokenSet", "runtime_tokens"),
    "jax._src.ad_checkpoint": ("remat_p",),
    "jax._src.lax.special": (
        "igamma_impl",
        "igamma_grad_a_impl",
        "igammac_impl",
        "regularized_incomplete_beta_impl",
    ),
}


def broken() -> list[str]:
    """Names of the private JAX attributes that ceedtap needs and this JAX lacks; empty when all is well."""
    missing = []
    for module_name, names in _PRIVATE.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        missing += [f"{module_name}.{name}" for name in names if not hasattr(module, name)]
    return missing


if _missing := broken():
    raise ImportError(
        f"ceedtap does not know this JAX ({jax.__version__}): it lacks {', '.join(_missing)}. "
        "Install a JAX that ceedtap is tested with (0.10.2 to 0.12) or a newer ceedtap."
    )

from jax._src import core as _core  # noqa: E402
from jax._src import debugging as _debugging  # noqa: E402
from jax._src import dispatch as _dispatch  # noqa: E402
from jax._src import effects as _effects  # noqa: E402
from jax._src import source_info_util as _source_info  # noqa: E402
from jax._src.ad_checkpoint import remat_p as _remat_p  # noqa: E402
from jax._src.ffi import build_ffi_lowering_function  # noqa: E402
from jax._src.lax.control_flow import loops as _loops  # noqa: E402
from jax._src.state.types import AbstractRef as _AbstractRef  # noqa: E402

Primitive = jex_core.Primitive
Effect = jex_core.Effect
AbstractValue: Any = jax.core.ShapedArray
LoweringRuleContext = mlir.LoweringRuleContext
primitive_jvps = ad.primitive_jvps
primitive_transposes = ad.primitive_transposes
primitive_batchers = batching.primitive_batchers
Zero = ad.Zero
instantiate_zeros = ad.instantiate_zeros
zeros: Callable[[Any], Any] = ad.zeros_like_aval  # of an abstract value, with its type, sharding and varying axes
is_undefined_primal = ad.is_undefined_primal
apply_primitive = xla.apply_primitive


register_lowering = mlir.register_lowering


def lower_in_place(primitive: Any, rule: Callable[..., Any]) -> None:
    """Sets how a primitive becomes MLIR on all platforms, right where it stands. JAX would put equal ones into a
    function of their own, in which those with side effects have no place among the others."""
    mlir.register_lowering(primitive, rule, cacheable=False)


def is_for_cpu(ctx: LoweringRuleContext) -> bool:
    """Whether the program is for CPUs, perhaps besides other platforms."""
    return "cpu" in (ctx.platforms or ctx.module_context.platforms)


class UniformPrimitive(Primitive):
    """A primitive whose operands differ between the same devices of a `shard_map`.

    Those that differ between fewer are cast first, as JAX does for its own primitives. The transpose of that cast is
    the sum over the devices that the cotangent of an operand needs that they share.
    """

    def bind(self, *operands: Any, **params: Any) -> Any:
        return super().bind(*_core.auto_insert_reshard(*operands), **params)


def zero_tangent(x: Any) -> Zero:
    """The symbolic zero in the tangent space of `x`."""
    return Zero(jax.typeof(x).to_tangent_aval())


def is_ref(x: Any) -> bool:
    """Whether `x` is a reference to an array that can be changed."""
    return isinstance(getattr(x, "aval", None), _AbstractRef) or isinstance(x, jax.Ref)


def as_operand(x: Any) -> Any:
    """`x` as an array of the type that it has in the program. Literals of a jaxpr reach rules as numbers of Python."""
    return x if isinstance(x, jax.Array | np.ndarray | np.generic) else jnp.asarray(x, jax.typeof(x).dtype)


_ours: set[type[Effect]] = set()


def allow_effect(effect_type: type[Effect], *, ordered: bool = False) -> None:
    """Lets an effect appear wherever JAX restricts effects; ordered effects also on several devices."""
    _ours.add(effect_type)
    for name in _EFFECT_REGISTRIES + (_ORDERED_REGISTRIES if ordered else ()):
        getattr(_effects, name).add_type(effect_type)


_in_loops: set[Any] = set()


def keep_in_loops(primitive: Any) -> None:
    """Tells of a primitive that emits without an effect, so that what it emits keeps the order of a loop."""
    _in_loops.add(primitive)


def set_dce_rule(primitive: Any, rule: Callable[[Sequence[bool], Any], Any]) -> None:
    """Sets ``rule(used_outputs, eqn)``. JAX 0.12 says in between which inputs are alive as well."""
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def lower_fun(function: Callable[..., list[Any]], ctx: LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers a function of JAX, which knows nothing of the mesh of the program."""
    avals: Any = ctx.avals_in
    plain = [AbstractValue(aval.shape, aval.dtype) for aval in avals]
    with apart():
        return mlir.lower_fun(function, multiple_results=True)(ctx.replace(avals_in=plain), *operands)


def add_keepalive(ctx: LoweringRuleContext, value: Any) -> None:
    """Keeps `value` alive as long as the lowered module and what is compiled from it."""
    ctx.module_context.add_keepalive(value)


def lower_ffi(target: str) -> Callable[..., Any]:
    """A function ``(ctx, *operands, **attributes) -> MLIR operation`` that calls the pure FFI target `target`."""
    return build_ffi_lowering_function(target, has_side_effect=False)


def emit_ffi_call(
    ctx: LoweringRuleContext,
    target: str,
    operands: Sequence[Any],
    ordered_effect: Effect | None,
    *,
    avals_in: Sequence[Any] | None = None,
    avals_out: Sequence[Any] = (),
    **attributes: Any,
) -> list[Any]:
    """Calls the FFI target `target`, which has a side effect; returns its results.

    With `ordered_effect`, the call takes that effect's token and hands it on, which puts it in program order. Without,
    a token of its own puts it after such calls that come before it in the same straight piece of code.
    """
    lower = build_ffi_lowering_function(target, has_side_effect=True)
    avals_in = list(ctx.avals_in if avals_in is None else avals_in)
    token = _last_token(ctx) if ordered_effect is None else ctx.tokens_in.get(ordered_effect)
    if token is not None:
        avals_in, operands = [_core.abstract_token, *avals_in], [token, *operands]
    ctx_of_call = ctx.replace(avals_in=avals_in, avals_out=[_core.abstract_token, *avals_out])
    token, *results = lower(ctx_of_call, *operands, **attributes).results
    if ordered_effect is None:
        _set_last_token(ctx, token)
    else:
        # In the context itself: JAX does not look at copies of it.
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ordered_effect: token})))
    return results


def _last_tokens(ctx: LoweringRuleContext) -> list[tuple[Any, Any]]:
    """The latest token in each block of code of the module that is being made."""
    tokens: list[tuple[Any, Any]] = ctx.module_context.cached_primitive_lowerings.setdefault("ceedtap tokens", [])
    return tokens


def _last_token(ctx: LoweringRuleContext) -> Any:
    """That of the block of code which is being made; None: there is none yet."""
    block = _ir.InsertionPoint.current.block
    for known, token in reversed(_last_tokens(ctx)):
        if known == block:
            return token
    return None


def _set_last_token(ctx: LoweringRuleContext, token: Any) -> None:
    block, tokens = _ir.InsertionPoint.current.block, _last_tokens(ctx)
    tokens[:] = [*((known, other) for known, other in tokens if known != block), (block, token)]


def emit_python_call(
    ctx: LoweringRuleContext, callback: Callable[..., Any], operands: Sequence[Any], ordered_effect: Effect | None
) -> Any:
    """Calls a Python function with a side effect and the results of `ctx`; with whole arrays, on one device."""
    if ordered_effect is None:
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_out]
        io_call = functools.partial(jax.experimental.io_callback, callback, shapes)
        return mlir.lower_fun(io_call, multiple_results=True)(ctx, *operands)
    avals: Any = (ctx.avals_in, ctx.avals_out)
    token = ctx.tokens_in.get(ordered_effect)
    results, token, _ = mlir.emit_python_callback(ctx, callback, token, list(operands), *avals, has_side_effect=True)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ordered_effect: token})))
    return results


def _never_called(*_: Any) -> tuple[()]:
    return ()


def dispatch_synchronously(ctx: LoweringRuleContext) -> None:
    """Makes XLA run the program on the thread that starts it, if its inputs are ready.

    XLA's CPU client does so for programs with Python callbacks. Otherwise it runs them on one of a few threads, which
    would not be there for the programs of host functions that the first program waits for.
    """
    if not ctx.module_context.host_callbacks:
        ctx.module_context.add_host_callback(_never_called)


def result_aval(primitive: Primitive, shape: Sequence[int], dtype: Any, operands: Sequence[Any]) -> Any:
    """The abstract value of a result, which differs between the devices of a `shard_map` as the operands do."""
    varying = _core.standard_vma_rule(primitive.name, *operands)
    sharding = _core.get_cur_mesh_sharding(jax.sharding.PartitionSpec(*[None] * len(shape)))
    mat = _core.ManualAxisType(varying=varying)
    return AbstractValue(tuple(shape), dtype, sharding=sharding, manual_axis_type=mat)


def emit_python_effect(
    ctx: LoweringRuleContext, callback: Callable[..., Any], operands: Sequence[Any], ordered_effect: Effect | None
) -> None:
    """Calls a Python function that has a side effect and no results. A partitioned program calls it for every shard."""
    token = None if ordered_effect is None else ctx.tokens_in.get(ordered_effect)
    _, token, _ = mlir.emit_python_callback(
        ctx, callback, token, list(operands), cast(Any, ctx.avals_in), [],
        has_side_effect=True, partitioned=is_partitioned(ctx),
    )  # fmt: skip
    if ordered_effect is not None:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ordered_effect: token})))


def is_partitioned(ctx: LoweringRuleContext) -> bool:
    """Whether XLA will split this program over devices, wholly or along some axes of the mesh.

    There, XLA's partitioner refuses custom calls with side effects, except for its own Python callbacks and for those
    with a rule; see :func:`register_partitioner`.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices > 1
    if isinstance(context, mlir.SPMDAxisContext):
        return bool(set(context.mesh.axis_names) - set(context.manual_axes))
    return False


def num_parts(ctx: LoweringRuleContext) -> int:
    """On how many devices the program runs."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext):
        return int(context.num_devices)
    return int(context.mesh.size) if isinstance(context, mlir.SPMDAxisContext) else 1


def mesh_axes(ctx: LoweringRuleContext) -> tuple[tuple[str, int], ...]:
    """Names and sizes of the axes of the mesh whose devices, in order, are the parts of the program; () when JAX knows
    none."""
    context: Any = ctx.module_context.axis_context
    candidates = [getattr(context, "mesh", None), getattr(context, "abstract_mesh", None)]
    candidates += [aval.sharding.mesh for aval in ctx.avals_in if isinstance(aval, AbstractValue)]
    for mesh in candidates:
        if mesh is not None and not mesh.empty and mesh.size == num_parts(ctx):
            return tuple((str(name), int(size)) for name, size in mesh.shape.items())
    return ()


def manual_axes(ctx: LoweringRuleContext) -> tuple[str, ...]:
    """The axes of the mesh along which the program is written for one device, as in `jax.shard_map`."""
    return tuple(map(str, getattr(ctx.module_context.axis_context, "manual_axes", ())))


def prepare_order(ctx: LoweringRuleContext, what: str) -> None:
    """What must be done where an ordered effect is emitted on several devices.

    Raises:
        NotImplementedError: this JAX compiles no ordered effect there; XLA would end the process.
    """
    if num_parts(ctx) == 1 or jax.__version_info__ >= (0, 12):
        return
    if is_partitioned(ctx) and manual_axes(ctx):
        raise NotImplementedError(
            f"{what} with ordered=True in a `jax.shard_map` over some axes of the mesh only: JAX {jax.__version__} "
            "cannot compile it. Use ordered=False, a shard_map over all axes, or JAX 0.12"
        )
    if getattr(
        jax.config, "jax_compilation_cache_dir", None
    ):  # XLA would end the process when it writes the program there
        dispatch_synchronously(ctx)


def part_number() -> tuple[Any, Any]:
    """In a program that runs on several devices: the number of the part that runs, and its abstract value."""
    return _stablehlo.partition_id(), AbstractValue((), np.dtype(np.uint32))


def lower_any(ctx: LoweringRuleContext, operand: Any, aval: Any) -> Any:
    """Whether any element of a Boolean operand is true."""
    if not aval.shape:
        return operand
    scalar = AbstractValue((), np.dtype(np.bool_))
    ctx = ctx.replace(avals_in=[aval], avals_out=[scalar], tokens_in=mlir.TokenSet(), tokens_out=None, primitive=None)
    return mlir.lower_fun(jnp.any, multiple_results=False)(ctx, operand)[0]


def emit_partitioned_call(
    ctx: LoweringRuleContext, target: str, text: bytes, operands: Sequence[Any], ordered_effect: Effect | None
) -> None:
    """Calls what the rule of `target` makes for each part of the program; see :func:`register_partitioner`."""
    token = _last_token(ctx) if ordered_effect is None else ctx.tokens_in.get(ordered_effect)
    if token is None:  # the rule wants one
        token = _stablehlo.create_token()
    call = _stablehlo.CustomCallOp(
        [_stablehlo.TokenType.get()],
        [token, *operands],
        call_target_name=_ir.StringAttr.get(target),
        has_side_effect=_ir.BoolAttr.get(True),
        api_version=mlir.i32_attr(2),
        called_computations=_ir.ArrayAttr.get([]),
        backend_config=_ir.StringAttr.get("hex" + text.hex()),
        operand_layouts=None,
        result_layouts=None,
    )
    if ordered_effect is None:
        _set_last_token(ctx, call.results[0])
    else:
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ordered_effect: call.results[0]})))


@dataclass(frozen=True)
class PartedOperand:
    """An operand of a call in a program that XLA splits.

    Attributes:
        shape: of the array in the whole program.
        part_shape: of what a part of the program has.
        dtype: element type; None for a token.
        element: the same for MLIR, ``"token"`` for a token.
        sharding: XLA's description of who has what.
    """

    shape: tuple[int, ...]
    part_shape: tuple[int, ...]
    dtype: Any
    element: str
    sharding: Any


def register_partitioner(target: str, partition: Callable[[Sequence[PartedOperand], bytes], str]) -> None:
    """Sets the rule of a custom call with side effects in programs that XLA splits over devices.

    ``partition(operands, text)`` gets the text that the call carries and returns the MLIR module that each part runs.
    The first operand is a token, and so is the result.
    """

    def rule(shapes: Any, shardings: Any, _: Any, result_sharding: Any, text: bytes) -> Any:
        with mlir.make_ir_context():
            operands = [_parted(shape, sharding) for shape, sharding in zip(shapes, shardings, strict=True)]
            module = _ir.Module.parse(partition(operands, bytes.fromhex(text.decode().removeprefix("hex"))))
            return mlir.module_to_bytecode(module), shardings, result_sharding

    def propagate(sharding: Any, *_: Any) -> Any:
        return sharding

    def infer(*_: Any) -> Any:
        return xla_client.HloSharding.replicate()

    xla_client.register_custom_call_partitioner(
        target, propagate, rule, infer, can_side_effecting_have_replicated_sharding=True
    )


def _parted(shape: Any, sharding: Any) -> PartedOperand:
    if shape.is_token():
        return PartedOperand((), (), None, "token", sharding)
    dtype = np.dtype(shape.numpy_dtype())
    part_shape = tuple(sharding.tile(shape).dimensions())
    return PartedOperand(tuple(shape.dimensions()), part_shape, dtype, str(mlir.dtype_to_ir_type(dtype)), sharding)


# -- waiting ---------------------------------------------------------------------------------------------------------


def wait_for_effects() -> None:
    """Waits for the programs with effects that this thread has dispatched, whether they fail or not: as
    `jax.effects_barrier`, which ends at the first one that has failed."""
    tokens = _dispatch.runtime_tokens
    for effect, token in list(tokens.current_tokens.items()):
        try:
            token.block_until_ready()
        except jax.errors.JaxRuntimeError:
            if type(effect) in _ours:
                tokens.current_tokens.pop(effect, None)
    for token in list(tokens.output_runtime_tokens.values()):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            token.block_until_ready()


def _next(x: Any) -> Any:
    return x + 1


_fence = jax.jit(_next)


def wait_for_results(timeout: float | None) -> None:
    """Waits for programs without effects, which `jax.effects_barrier` does not know: for those whose results somebody
    holds, and for those that this thread has dispatched.

    The programs that one thread gives to a device run one after the other, so a last small one ends after all of them.
    """
    end = None if timeout is None else time.monotonic() + timeout
    with concrete():
        fences = [_fence(jax.device_put(np.int32(0), device)) for device in jax.local_devices(backend="cpu")]
        waiting = [*jax.live_arrays(), *fences]
    pause = 1e-5
    while waiting := [array for array in waiting if not _is_done(array)]:
        if end is not None and time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def _is_done(array: Any) -> bool:
    try:
        return bool(array.is_deleted() or array.is_ready())
    except RuntimeError:  # it was deleted meanwhile
        return True


# -- reading jaxprs --------------------------------------------------------------------------------------------------


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a constant in the equation."""
    return isinstance(atom, jex_core.Literal)


def sub_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation."""
    return list(jex_core.jaxprs_in_params(eqn.params))


def user_line(eqn: Any) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that an equation comes from, and not of an installed library that the
    user's code calls, if that can be told."""
    frames = list(_source_info.user_frames(eqn.source_info.traceback))
    own = (f for f in frames if not {"site-packages", "dist-packages"} & set(f.file_name.replace("\\", "/").split("/")))
    frame = next(own, frames[0] if frames else None)
    return None if frame is None else (frame.file_name, frame.start_line, frame.function_name)


def user_span(eqn: Any) -> tuple[str, int, int, int, int] | None:
    """File, and first line and column, and last ones, of the expression in the user's code that made an equation."""
    frame = _source_info.user_frame(eqn.source_info.traceback)
    if frame is None:
        return None
    return frame.file_name, frame.start_line, frame.start_column, frame.end_line, frame.end_column


def name_stack(eqn: Any) -> str:
    """The transformations and named scopes that an equation comes out of, such as ``transpose(jvp())``."""
    return str(eqn.source_info.name_stack)


def jaxpr_function(closed: Any) -> Callable[..., list[Any]]:
    """A closed jaxpr as a function."""
    function: Callable[..., list[Any]] = jex_core.jaxpr_as_fun(closed)
    return function


def contains(closed: Any, primitives: Collection[Any]) -> bool:
    """Whether there is an equation of these primitives in a jaxpr, functions in it included."""
    return any(
        eqn.primitive in primitives or any(contains(inner, primitives) for inner in sub_jaxprs(eqn))
        for eqn in getattr(closed, "jaxpr", closed).eqns
    )


#: Functions in functions that can be evaluated equation by equation; the second kind has a rule for its derivative.
_OPENED = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"}
_CUSTOM = {"custom_jvp_call", "custom_vjp_call"}


def interpreter(closed: Any, rules: Mapping[Any, Callable[..., Any]], *, differentiable: bool) -> Callable[..., list]:
    """A closed jaxpr as a function in which ``rules[primitive](*operands, **params)`` stands for some primitives.

    Functions in functions are opened where they contain such primitives. If the result is to be `differentiable`, those
    with a rule for their derivative keep it.

    Raises:
        NotImplementedError: there is one in a branch or a loop; the message names the user's line.
    """

    def bind(eqn: Any, operands: Sequence[Any]) -> Any:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive in rules:
            return rules[eqn.primitive](*operands, **params)
        if any(contains(inner, rules) for inner in sub_jaxprs(eqn)):
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            if inner is None or name not in _OPENED | _CUSTOM:
                line = user_line(eqn)
                where = f" at {line[0]}:{line[1]} ({line[2]})" if line else ""
                raise NotImplementedError(f"in a branch or a loop: `{name}`{where}")
            if name in _OPENED or not differentiable:
                return run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
            rewritten = interpreter(inner, rules, differentiable=True)
            params = {**params, "call_jaxpr": jax.make_jaxpr(rewritten)(*inner.in_avals)}
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))

    def run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else values[atom]

        for eqn in jaxpr.eqns:
            names = _source_info.current_name_stack() + eqn.source_info.name_stack
            with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
                outs = bind(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, outs if eqn.primitive.multiple_results else [outs], strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return lambda *args: run(closed.jaxpr, closed.consts, args)


debug_print_p = _debugging.debug_print_p
debug_callback_p = _debugging.debug_callback_p


def is_ordered_debugging(params: Mapping[str, Any]) -> bool:
    """Whether an equation of :func:`jax.debug.print` or :func:`jax.debug.callback` has ``ordered=True``."""
    return bool(params.get("ordered")) or _effects.ordered_effects.contains(
        params.get("effect", _debugging.debug_effect)
    )


def key_functions(dtype: Any) -> Any:
    """What makes, splits and uses random keys of an extended type: functions of the numbers that a key consists of."""
    return dtype._impl


def without_dead_code(closed: Any) -> Any:
    """The closed jaxpr without equations that its outputs do not need; it keeps all inputs."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jex_core.ClosedJaxpr(jaxpr, closed.consts)


def used_inputs(closed: Any) -> list[bool]:
    """Which inputs the outputs of a closed jaxpr depend on."""
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return list(used)


def with_outputs(eqn: Any, used: Sequence[bool], params: dict[str, Any]) -> Any:
    """An equation with some of its outputs only, and other parameters."""
    outvars = [var for var, wanted in zip(eqn.outvars, used, strict=True) if wanted]
    return eqn.replace(outvars=outvars, params={**eqn.params, **params})


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a scan."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def special_function(name: str) -> Callable[..., Any]:
    """What JAX itself makes of a special function, in terms of simpler ones: arrays of one shape and type -> array."""
    module = importlib.import_module("jax._src.lax.special")
    function = getattr(module, f"{name}_impl")
    return lambda *args: function(*args, dtype=args[0].dtype)


def expansion(primitive: Any) -> Callable[..., Any]:
    """What a primitive of JAX's high-level kind is made of: a function of its flat operands, with flat results."""

    def function(*operands: Any) -> Any:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    return function


def concrete() -> Any:
    """A context in which JAX computes right now, even where a function is being traced."""
    return jax.ensure_compile_time_eval()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context that knows nothing of the program that is being traced or lowered, such as the mesh of its `shard_map`.

    For what is made once and used by all programs.
    """
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), _core.eval_context():
        yield


def _capsule(address: Any) -> Any:
    return jax.ffi.pycapsule(ctypes.c_void_p(int(ffi.cast("uintptr_t", address))))


def _register_targets() -> None:
    for name in ("tap", "call", "operator", "pointwise"):
        # The type first: XLA asks an instantiate handler for the type of the state that it makes.
        state: Any = {key: _capsule(getattr(lib, f"ct_{name}_{key}")()) for key in ("type_id", "type_info")}
        jax.ffi.register_ffi_type(f"ceedtap_{name}_state", state, platform="cpu")
        stages = ("instantiate", "execute")
        handlers = {stage: _capsule(getattr(lib, f"ct_{name}_{stage}_address")()) for stage in stages}
        jax.ffi.register_ffi_target(f"ceedtap_{name}", handlers, platform="cpu")


_register_targets()


# -- corrections: what JAX does wrong with effects, for programs with ours only ----------------------------------------


def _keep_effects_in_scan() -> None:
    """Derivatives of `scan` move what depends on its constants alone out of the loop, effects included: a tap of such a
    value would fire once and not in every step. A scan with our effects keeps everything inside."""
    hoist = _loops._scan_known_hoisting

    def guarded(jaxpr: Any, consts: Any, num_res: int, *rest: Any) -> Any:
        if any(type(effect) in _ours for effect in jaxpr.effects):
            return jaxpr, consts, [False] * num_res, []
        return hoist(jaxpr, consts, num_res, *rest)

    _loops._scan_known_hoisting = guarded

    # Under `checkpoint` another rule does the same, except for references to arrays. A copy of it that takes everything
    # for a reference, and in which nothing can be taken out, leaves all in the loop.
    rule = _loops._scan_partial_eval_custom

    def take_nothing_out(jaxpr: Any, *_: Any) -> tuple[Any, Any, list[bool], list[Any]]:
        nothing = jax.make_jaxpr(list)()
        info = jaxpr.jaxpr.debug_info.with_unknown_names()
        nothing = jex_core.ClosedJaxpr(nothing.jaxpr.replace(debug_info=info), [])
        return nothing, jaxpr, [True] * len(jaxpr.out_avals), []

    private = types.SimpleNamespace(**{**vars(_loops.pe), "partial_eval_jaxpr_nounits": take_nothing_out})
    keeps = _with_globals(rule, state=types.SimpleNamespace(AbstractRef=object), pe=private)

    def chosen(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
        ours = any(type(effect) in _ours for effect in eqn.effects)
        return (keeps if ours else rule)(saveable, unknown, instantiated, eqn)

    partial_eval.partial_eval_jaxpr_custom_rules[_loops.scan_p] = chosen


def _refuse_ordered_effects_in_batched_predicates() -> None:
    """JAX's lowering of a while loop whose predicate differs between lanes and has an ordered effect does not freeze
    the lanes that are done, so its results are wrong (`jax.debug.print(ordered=True)` as well)."""
    lower = _loops._while_lowering

    def guarded(ctx: Any, *args: Any, cond_jaxpr: Any, **params: Any) -> Any:
        if cond_jaxpr.out_avals[0].shape and any(
            type(e) in _ours and _effects.ordered_effects.contains(e) for e in cond_jaxpr.effects
        ):
            raise NotImplementedError(
                "an ordered tap in the predicate of a while_loop that differs between the lanes of a vmap; tap in the "
                "body, or without ordered=True"
            )
        return lower(ctx, *args, cond_jaxpr=cond_jaxpr, **params)

    mlir.register_lowering(_loops.while_p, guarded)


def _keep_order_in_unrolled_scans() -> None:
    """JAX calls the body of an unrolled scan as a function several times in a row, and XLA runs what is independent in
    them in any order. A scan with our effects stays a loop."""
    lower = mlir.lower_fun(_loops._scan_impl, multiple_results=True)

    def guarded(ctx: Any, *args: Any, jaxpr: Any, unroll: int, **params: Any) -> Any:
        ours = any(type(effect) in _ours for effect in jaxpr.effects) or contains(jaxpr, _in_loops)
        return lower(ctx, *args, jaxpr=jaxpr, unroll=1 if ours else unroll, **params)

    mlir.register_lowering(_loops.scan_p, guarded)


def _keep_effects_of_checkpoint() -> None:
    """Linearising `checkpoint` forgets effects of tangents unless the result depends on what `checkpoint` returns; with
    `jit` or `scan` in its place they are kept."""
    rule = partial_eval.custom_partial_eval_rules[_remat_p]
    pe = rule.__globals__["pe"]

    def kept(
        trace: Any, in_tracers: Any, out_tracers: Any, primitive: Any, params: Any, effects: Any, *rest: Any
    ) -> Any:
        recipe = pe.new_eqn_recipe(trace, in_tracers, out_tracers, primitive, params, effects, *rest)
        if any(type(effect) in _ours for effect in effects):
            trace.effect_handles.append(pe.EffectHandle(in_tracers, recipe))
        return recipe

    private = types.SimpleNamespace(**{**vars(pe), "new_eqn_recipe": kept})
    partial_eval.custom_partial_eval_rules[_remat_p] = _with_globals(rule, pe=private)


def _with_globals(function: Any, **others: Any) -> Any:
    """A copy of a function that sees other global names."""
    names = {**function.__globals__, **others}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _tap_known_loops_once() -> None:
    """Linearising a `while_loop` runs all of it again in the linear function, with what was known before and its
    effects. What is known is computed again there, as in `checkpoint`, but not tapped again."""
    pe, nothing_saveable = _loops.pe, _loops.ad_checkpoint.nothing_saveable

    def quiet(closed: Any, unknown: Sequence[bool], out_unknown: Sequence[bool]) -> Any:
        inputs = [True] * len(unknown)
        split = pe.partial_eval_jaxpr_custom(closed.jaxpr, unknown, inputs, out_unknown, True, nothing_saveable)
        return jex_core.ClosedJaxpr(split[1], closed.consts)

    def quiet_params(params: dict[str, Any], unknown: Sequence[bool], carry: Sequence[bool]) -> dict[str, Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        body = quiet(params["body_jaxpr"], [*unknown[first:second], *carry], carry)
        cond = quiet(params["cond_jaxpr"], [*unknown[:first], *carry], [False])
        return {**params, "cond_jaxpr": cond, "body_jaxpr": body}

    rule = pe.custom_partial_eval_rules[_loops.while_p]

    def guarded(trace: Any, *tracers: Any, **params: Any) -> Any:
        run_before = False
        unknown = [not tracer.pval.is_known() for tracer in tracers]

        class Loop:
            """The primitive, which is bound for the part that is known."""

            def bind(self, *args: Any, **known: Any) -> Any:
                nonlocal run_before
                run_before = True
                return _loops.while_p.bind(*args, **known)

        class Trace:
            def default_process_primitive(self, _: Any, tracers: Any, params: Any) -> Any:
                if run_before:
                    params = quiet_params(params, unknown, carry_unknown())
                return trace.default_process_primitive(_loops.while_p, tracers, params)

        def carry_unknown() -> list[bool]:
            first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carry: list[bool] = unknown[second:]
            while True:
                out = pe.partial_eval_jaxpr_nounits(params["body_jaxpr"], [*unknown[first:second], *carry], carry)[2]
                if list(out) == carry:
                    return carry
                carry = [a or b for a, b in zip(carry, out, strict=True)]

        return _with_globals(rule, while_p=Loop())(Trace(), *tracers, **params)

    def chosen(trace: Any, *tracers: Any, **params: Any) -> Any:
        effects = params["cond_jaxpr"].effects | params["body_jaxpr"].effects
        return (guarded if any(type(e) in _ours for e in effects) else rule)(trace, *tracers, **params)

    pe.custom_partial_eval_rules[_loops.while_p] = chosen

    inner_rule = pe.partial_eval_jaxpr_custom_rules[_loops.while_p]

    def inner(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
        known, staged, out_unknown, *rest = inner_rule(saveable, unknown, instantiated, eqn)
        if known is not None and any(type(effect) in _ours for effect in eqn.effects):
            params = quiet_params(eqn.params, unknown, out_unknown)
            kept = params["cond_jaxpr"].effects | params["body_jaxpr"].effects
            effects = {e for e in eqn.effects if type(e) not in _ours or e in kept}
            staged = eqn.replace(params=params, effects=effects)
        return known, staged, out_unknown, *rest

    pe.partial_eval_jaxpr_custom_rules[_loops.while_p] = inner


def _forget_failed_orders() -> None:
    """A program with an ordered effect that fails leaves a token that lets every later program with that effect fail,
    on any device, with an error that is not theirs. Who waits for the result of the first one gets its error."""
    tokens: Any = _dispatch.RuntimeTokenSet
    get = tokens.get_token_input

    def guarded(self: Any, effect: Any, devices: Any) -> Any:
        try:
            return get(self, effect, devices)
        except jax.errors.JaxRuntimeError:
            if type(effect) not in _ours:
                raise
            self.current_tokens.pop(effect, None)
            return get(self, effect, devices)

    tokens.get_token_input = guarded


def _explain_missing_tokens() -> None:
    """Primitives whose lowering hides the effects of functions in them have no token for an ordered one: a bare
    KeyError in JAX's lowering."""

    def guarded(method: Callable[..., Any], tokens: Any, wanted: Any) -> Any:
        effects = [wanted] if isinstance(wanted, Effect) else list(wanted)
        if any(type(effect) in _ours and effect not in tokens.effects() for effect in effects):
            raise NotImplementedError(
                "an ordered tap or call inside of a primitive that hides from JAX that its functions have effects, "
                "such as lineax.linear_solve: JAX cannot put it in order there. Leave out ordered=True, or use a "
                "solver that is made of JAX's own loops, such as jax.scipy.sparse.linalg.cg"
            )
        return method(tokens, wanted if isinstance(wanted, Effect) else effects)

    for name in ("get", "subset"):
        method = getattr(mlir.TokenSet, name)
        setattr(mlir.TokenSet, name, lambda tokens, wanted, method=method: guarded(method, tokens, wanted))


_forget_failed_orders()
_explain_missing_tokens()
_keep_effects_in_scan()
_refuse_ordered_effects_in_batched_predicates()
_keep_order_in_unrolled_scans()
_keep_effects_of_checkpoint()
_tap_known_loops_once()
