"""`call`: values that host functions compute, back into the program.

A compiled program puts the operands into a native list and goes on when it has got the results (native/call.c). Threads
of our own take them from there and run the host functions. They are not those of the outfeed, so neither waits for the
other; and there is always one more of them than there are host functions running, so that a host function may run
programs that call host functions.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hashlib
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ceedtap import arguments, jax_compat, notebook, outfeed
from ceedtap.arguments import Interned, take_apart
from ceedtap.host_functions import check_function, check_result
from ceedtap.native import ffi, lib
from ceedtap.primitive import OrderedTapEffect, TapEffect
from ceedtap.protocol import DTYPES, ArraySpec, Header, array_decoder, encode_header
from ceedtap.routes import local_devices

#: Exceptions of host functions that are kept for :func:`original_exception`, with all that their tracebacks refer to.
MAX_KEPT_EXCEPTIONS = 16
#: Characters of a traceback that go into the error of a program.
MAX_TRACEBACK = 8000

# -- public functions ------------------------------------------------------------------------------------------------


class CallError(RuntimeError):
    """A host function has failed. `__cause__` is the exception that it raised; without one, its result was wrong."""


def call(
    host_func: Callable[..., Any],
    *args: Any,
    result_shape: Any,
    jvp: Callable[..., Any] | None = None,
    vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    timeout: float | None = None,
    vmap: Literal["loop", "batched"] = "loop",
    ordered: bool = False,
    call_with_device: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls ``host_func(*args, **kwargs)`` on the host when the program runs, and returns what it returns.

    The function is called exactly once for each time that the program comes by, whether the result is used or not.

    Args:
        host_func: called with NumPy arrays of its own in place of the leaves of `args` (typed JAX keys in place of
            keys), on a thread of its own; outside of compiled code on the calling thread. It may use JAX, run programs
            with taps and calls, and be called by several programs at a time. (JAX lets nobody call a jitted function
            while its first call goes on: one that calls itself through the host must have been called before.)
        args: pytrees of arrays.
        result_shape: what `host_func` returns: a pytree of numbers, arrays or `jax.ShapeDtypeStruct`. The result must
            have its structure, shapes and types; only Python numbers take the type that is wanted.
        jvp: ``jvp(primals, tangents)`` returns the result and its tangent, as for `jax.custom_jvp`; a function of JAX,
            in which `call` may be used.
        vjp: a pair ``(forward, backward)`` as for `jax.custom_vjp`: ``forward(*args)`` returns the result and
            residuals, ``backward(residuals, cotangents)`` a tuple of cotangents of `args`.
        timeout: seconds after which the program fails; None waits as long as it takes. The function is not stopped,
            what it returns later is thrown away.
        vmap: what `jax.vmap` makes of the call. ``"loop"``: one call for each lane, in order. ``"batched"``: one call,
            with a leading axis for the lanes in all arguments and, wanted, in all results.
        ordered: calls and taps that are ordered take place in the order of the program. Otherwise those that do not
            depend on each other may overtake each other.
        call_with_device: `host_func` also gets ``device=``, the `jax.Device` that runs the program; None where JAX does
            not tell.
        kwargs: passed on to `host_func`.

    Returns:
        What `host_func` returned, with JAX arrays for leaves. In a `jax.shard_map` each device calls with its part;
        where XLA itself splits the program over devices, there is one call with whole arrays.

    Raises:
        CallError: outside of compiled code: `host_func` has raised or returned something wrong, or the time is over.
        jax.errors.JaxRuntimeError: in compiled code, where the result is waited for: the same, with the exception's
            traceback in the message. :func:`original_exception` gives the exception itself.
        TypeError: the call is differentiated and has neither `jvp` nor `vjp`.

    >>> import ceedtap as ct, jax, numpy as np
    >>> def sine(x):
    ...     def jvp(primals, tangents):
    ...         return sine(*primals), ct.call(np.cos, *primals, result_shape=x) * tangents[0]
    ...     return ct.call(np.sin, x, result_shape=x, jvp=jvp)
    >>> print(jax.jit(jax.grad(sine))(0.0))
    1.0
    """
    if not callable(host_func):
        raise TypeError(f"call needs a function, got {type(host_func).__name__}")
    for func, what in ((host_func, "the function of a call"), (jvp, "jvp="), *((func, "vjp=") for func in vjp or ())):
        if func is not None:
            check_function(func, what)
    if vmap not in ("loop", "batched"):
        raise ValueError(f"vmap is 'loop' or 'batched', got {vmap!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is a positive number of seconds or None, got {timeout!r}")
    if jvp is not None and vjp is not None:
        raise ValueError("give one of jvp= and vjp=: what has a jvp can be differentiated in both directions")
    results, out_tree = jax.tree.flatten(result_shape)
    specs = tuple(map(_result_spec, results))

    def run(*args: Any) -> Any:
        taken = take_apart(args, "call")
        function = _function(host_func, kwargs, taken.treedef, out_tree, taken.keys, timeout, call_with_device)
        return jax.tree.unflatten(
            out_tree, call_p.bind(*taken.arrays, function=function, specs=specs, ordered=ordered, vmap=vmap)
        )

    if jvp is not None:
        with_jvp = jax.custom_jvp(run)
        with_jvp.defjvp(jvp)
        return with_jvp(*args)
    if vjp is not None:
        with_vjp = jax.custom_vjp(run)
        with_vjp.defvjp(*vjp)
        return with_vjp(*args)
    return run(*args)


def original_exception(error: BaseException) -> BaseException | None:
    """The exception of a host function that made a program fail with `error`.

    None when there was none (a time-out), or when it has been forgotten: the latest 16 are kept.

    >>> import ceedtap as ct, jax
    >>> try:
    ...     jax.jit(lambda x: ct.call(lambda x: 1 / 0, x, result_shape=x))(1.0).block_until_ready()
    ... except jax.errors.JaxRuntimeError as error:
    ...     print(repr(ct.original_exception(error)))
    ZeroDivisionError('division by zero')
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        candidate = todo.pop(0)
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, CallError):
            return candidate.__cause__ or candidate
        if match := _MARK.search(str(candidate)):
            with _kept_lock:
                return _kept.get(int(match[1]))
        todo += [candidate.__cause__, candidate.__context__, *getattr(candidate, "exceptions", ())]
    return None


# -- arguments and results -------------------------------------------------------------------------------------------


def _result_spec(leaf: Any) -> ArraySpec:
    if isinstance(leaf, bool | int | float | complex):
        return ArraySpec((), np.dtype(jnp.result_type(leaf)))
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            f"result_shape is made of numbers, arrays and jax.ShapeDtypeStruct, got {type(leaf).__name__}: {leaf!r}"
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"a host function cannot return {leaf.dtype}; let it return jax.random.key_data of the keys")
    dtype = np.dtype(leaf.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"result_shape has type {dtype}, which needs jax.config.update('jax_enable_x64', True)")
    if dtype not in DTYPES:
        raise TypeError(f"a host function cannot return values of type {dtype}")
    return ArraySpec(tuple(int(d) for d in leaf.shape), dtype)


def _number_fits(value: object, dtype: np.dtype) -> bool:
    if isinstance(value, bool):
        return dtype == np.bool_
    kinds: tuple[Any, ...] = (jnp.complexfloating,)
    if not isinstance(value, complex):
        kinds = (*kinds, jnp.floating)
    if isinstance(value, int):
        kinds = (*kinds, jnp.integer)
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _describe(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, eq=False)
class Function:
    """A host function with what all calls of it have in common.

    Attributes:
        func: the function.
        kwargs: keyword arguments of every call.
        treedef: structure of its positional arguments.
        out_tree: structure of its result.
        keys: for each leaf of the arguments, the name of the random number generator when it holds keys.
        timeout: seconds, or None.
        with_device: whether the function also gets ``device=``.
    """

    func: Callable[..., Any]
    kwargs: dict[str, Any]
    treedef: Any
    out_tree: Any
    keys: tuple[str | None, ...]
    timeout: float | None
    with_device: bool

    @property
    def name(self) -> str:
        func = self.func
        while isinstance(func, functools.partial):
            func = func.func
        return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or type(func).__qualname__

    def __str__(self) -> str:
        return self.name

    def __call__(
        self, leaves: list[Any], specs: Sequence[ArraySpec], device: jax.Device | None = None
    ) -> list[np.ndarray]:
        """Calls the function for a program on a device; returns the leaves of its result as arrays in C order.

        Raises:
            CallError: the result is not as it was declared.
            BaseException: what the function raises.
        """
        for i, key in enumerate(self.keys):
            if key is not None:
                leaves[i] = jax.random.wrap_key_data(leaves[i], impl=key)
        kwargs = {**self.kwargs, "device": device} if self.with_device else self.kwargs
        result = self.func(*jax.tree.unflatten(self.treedef, leaves), **kwargs)
        check_result(result, self.func, "the function of a call")
        paths, tree = jax.tree_util.tree_flatten_with_path(result)
        if tree != self.out_tree:
            raise CallError(f"host function `{self.name}` must return a {self.out_tree}, it returned a {tree}")
        return [self._checked(path, leaf, spec) for (path, leaf), spec in zip(paths, specs, strict=True)]

    def _checked(self, path: Any, leaf: Any, spec: ArraySpec) -> np.ndarray:
        expected = _describe(spec.shape, spec.dtype)
        where = f" at {jax.tree_util.keystr(path)}" if path else ""
        if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
            try:
                if spec.shape == () and _number_fits(leaf, spec.dtype):
                    return np.array(leaf, spec.dtype)
            except OverflowError:
                pass
            got = f"the Python number {leaf!r}"
        elif isinstance(leaf, np.ndarray | np.generic | jax.Array):
            if leaf.shape == spec.shape and leaf.dtype == spec.dtype:
                return np.asarray(leaf, spec.dtype, order="C")
            got = _describe(leaf.shape, leaf.dtype)
        else:
            got = f"a {type(leaf).__name__}"
        raise CallError(f"host function `{self.name}` must return {expected}{where}, it returned {got}")


_function = Interned(Function)

# -- errors ----------------------------------------------------------------------------------------------------------

_MARK = re.compile(r"\[ceedtap exception (\d+)\]")
_kept: collections.OrderedDict[int, BaseException] = collections.OrderedDict()
_kept_lock = threading.Lock()
_numbers = itertools.count(1)


def _foreign(tb: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is not ours."""
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _message(function: Function, error: BaseException) -> str:
    """The text of the XLA error for an exception, which is kept."""
    number = next(_numbers)
    with _kept_lock:
        _kept[number] = error
        while len(_kept) > MAX_KEPT_EXCEPTIONS:
            _kept.popitem(last=False)
    if isinstance(error, CallError) and error.__cause__ is None and _foreign(error.__traceback__) is None:
        text = str(error)
    else:
        lines = "".join(traceback.format_exception(type(error), error, _foreign(error.__traceback__)))
        if len(lines) > MAX_TRACEBACK:
            lines = f"{lines[: MAX_TRACEBACK // 2]}\n...\n{lines[-MAX_TRACEBACK // 2 :]}"
        text = f"host function `{function.name}` raised {_summary(error)}\n\n{lines}"
    return f"ceedtap: {text} [ceedtap exception {number}]"


# -- routes from programs to functions -------------------------------------------------------------------------------


class _Route:
    """What programs refer to by the id in a header: a function with the shapes of one call of it."""

    def __init__(self, function: Function, specs: tuple[ArraySpec, ...], header: Header) -> None:
        self.function = function
        self.specs = specs
        self.header = header
        self.decode = array_decoder(header)
        self.handle = ffi.new_handle(self)
        self.native = ffi.new("ct_function *")
        self.native.id = header.consumer_id
        self.native.route = self.handle
        self.native.name = function.name.encode()[:120]
        timeout = function.timeout
        self.native.timeout_ms = -1 if timeout is None else max(1, min(round(1000 * timeout), 10**12))


class _RouteReference:
    """Python's share in a route; programs hold theirs in the native registry."""

    # At the end of the process the names of this module may be gone before its objects are.
    _forget = staticmethod(functools.partial(lib.ct_registry_unref, lib.ct_functions()))

    def __init__(self, route: _Route) -> None:
        self.route = route

    def __del__(self) -> None:
        self._forget(self.route.header.consumer_id)


_routes: dict[int, _Route] = {}
_routes_lock = threading.RLock()


def _route(function: Function, args: tuple[ArraySpec, ...], specs: tuple[ArraySpec, ...]) -> _RouteReference:
    """A route; it lives as long as the reference or a program compiled with it.

    As for taps, the id is a hash, so that the next process finds its programs in JAX's persistent cache.
    """
    module = getattr(function.func, "__module__", None)
    options = (function.timeout, function.with_device)
    text = repr((module, function.name, str(function.treedef), str(function.out_tree), options, args, specs))
    with _routes_lock:
        _reap()
        for attempt in itertools.count():
            digest = hashlib.blake2b(f"call {text}#{attempt}".encode(), digest_size=8).digest()
            route_id = int.from_bytes(digest, "big") or 1
            route = _routes.get(route_id)
            if route is None or route.function is function:
                break
        if route is None:
            route = _Route(function, specs, Header(route_id, args))
        if lib.ct_registry_add(lib.ct_functions(), route_id, route.native):
            raise MemoryError("ceedtap: no memory for a route")
        _routes[route_id] = route
    _workers.start()
    return _RouteReference(route)


def _reap() -> None:
    """Lets go of routes that nothing refers to any more."""
    keys, payloads = ffi.new("uint64_t[64]"), ffi.new("void *[64]")
    while n := lib.ct_registry_reap(lib.ct_functions(), keys, payloads, 64):
        for key in keys[0:n]:
            _routes.pop(key, None)


# -- threads ---------------------------------------------------------------------------------------------------------


def _take_frame(call: Any) -> Any:
    """The bytes of the frame, for arrays that outlive the call."""
    size = call.size
    if size < outfeed.LEND_BYTES:
        return bytearray(ffi.buffer(call.bytes, size))
    return ffi.buffer(ffi.gc(ffi.cast("char *", lib.ct_call_take_bytes(call)), lib.ct_call_free_bytes, size), size)


_local = threading.local()


def _run_inside(_: Any = None) -> np.ndarray:
    inside, _local.inside = getattr(_local, "inside", None), None
    if inside is not None:
        inside()
    return np.zeros((), np.int32)


_program_lock = threading.Lock()
_program: list[Callable[[], jax.Array]] = []


def _callback_program() -> Callable[[], jax.Array]:
    with _program_lock:
        if not _program:
            program = jax.jit(lambda: jax.pure_callback(_run_inside, jax.ShapeDtypeStruct((), np.int32)))
            # JAX lets nobody else call a function before its first call has ended, and the others may end much later.
            program().block_until_ready()
            _program.append(program)
        return _program[0]


def _in_callback(run: Callable[[], Any]) -> Any:
    """What `run` returns, called from a Python callback of XLA's on this thread.

    There XLA runs programs on the thread that starts them. Elsewhere it hands all but the smallest to a pool of as many
    threads as there are cores or devices; those may all be taken by the programs, or their parts on several devices,
    that wait for host functions.
    """
    outcome: list[Any] = []

    def inside() -> None:
        try:
            outcome.append((run(), None))
        except BaseException as error:
            outcome.append((None, error))

    before = lib.ct_call_set_on_pool(1)
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            program = _callback_program()
            _local.inside = inside
            program().block_until_ready()
    finally:
        _local.inside = None
        lib.ct_call_set_on_pool(before)
    result, error = outcome[0] if outcome else (run(), None)
    if error is not None:
        raise error
    return result


def _answer(call: Any) -> None:
    route: _Route = ffi.from_handle(call.function.route)
    try:
        notebook.follow_cell()
        device = local_devices().get(call.device)
        run = functools.partial(route.function, route.decode(_take_frame(call)), route.specs, device)
        results = _in_callback(run) if call.on_pool else run()
        addresses = [ffi.cast("void *", result.__array_interface__["data"][0]) for result in results]
        data, sizes = ffi.new("const void *[]", addresses), ffi.new("uint64_t[]", [r.nbytes for r in results])
    except BaseException as error:  # whatever it is, the program waits for an answer
        lib.ct_call_fail(call, _message(route.function, error).replace("\0", "\\0").encode(errors="replace"))
    else:
        lib.ct_call_finish(call, len(results), data, sizes)


class _Workers:
    """The threads that run host functions. They are daemons: a function that hangs must not keep the process.

    One of them at least waits for calls while others run host functions. The native part says when that is no longer
    so, and when there are more than are needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.started = False
        self._idle: set[threading.Thread] = set()

    def start(self) -> None:
        with self._lock:
            if not self.started:
                self.started = True
                self._add()

    def _add(self) -> None:
        threading.Thread(target=self._run, name="ceedtap-call", daemon=True).start()

    def _run(self) -> None:
        outfeed.no_waiting.here = True
        thread, alone = threading.current_thread(), ffi.new("int *")
        self._idle.add(thread)
        while call := lib.ct_call_take(alone):
            self._idle.discard(thread)
            if alone[0]:
                with contextlib.suppress(RuntimeError):  # no thread can be started, as at the end of the process
                    self._add()
            _answer(call)
            self._idle.add(thread)
        self._idle.discard(thread)

    def join(self, timeout: float) -> None:
        """Waits for those that have nothing to do."""
        for thread in list(self._idle):
            thread.join(timeout)


_workers = _Workers()


def _shut_down() -> None:
    """At exit: lets programs end, but none of their calls takes longer than the patience that there is for taps."""
    if _workers.started:
        lib.ct_call_close(round(1000 * outfeed.EXIT_PATIENCE_SEC))
        with contextlib.suppress(KeyboardInterrupt):
            outfeed.wait_for_programs()
    outfeed.OUTFEED.shut_down()  # between the two: consumers may call
    if _workers.started:
        lib.ct_call_close(0)
        name = ffi.new("char[128]")
        if lib.ct_call_lost(name, 128):
            text = ffi.string(name).decode(errors="replace")
            print(f"ceedtap: the process ends although host function `{text}` has not returned", file=sys.stderr)
        _workers.join(1.0)


def _after_fork() -> None:
    """In the child of a fork: no threads, and locks that nobody holds."""
    global _workers, _kept_lock, _routes_lock, _program_lock
    _workers = _Workers()
    _kept_lock, _program_lock = threading.Lock(), threading.Lock()
    _routes_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.unregister(outfeed.OUTFEED.shut_down)
atexit.register(_shut_down)

# -- the primitive ---------------------------------------------------------------------------------------------------

# It has outputs and an effect: JAX must neither drop it nor evaluate it twice, whether its result is used or not.
call_p = jax_compat.UniformPrimitive("host_call")
call_p.multiple_results = True


@call_p.def_impl
def _call_impl(*args: Any, function: Function, specs: tuple[ArraySpec, ...], **_: Any) -> list[Any]:
    """Outside of compiled code: here and now, on the calling thread."""
    devices = {device for arg in args if isinstance(arg, jax.Array) for device in arg.devices()}
    device = devices.pop() if len(devices) == 1 else None
    run = functools.partial(function, [np.array(arg) for arg in args], specs, device)
    try:
        results = run() if function.timeout is None else _run_with_timeout(run, function.timeout)
    except CallError as error:
        raise error.with_traceback(None) from error.__cause__
    except Exception as error:
        raise CallError(f"host function `{function.name}` raised {_summary(error)}") from error
    return [jnp.array(result, device=device) for result in results]


def _run_with_timeout(run: Callable[[], Any], timeout: float) -> Any:
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((run(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="ceedtap-call", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(f"it has not returned within the time-out of {timeout:g} s. It may still be running.")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _callback_lowering(
    ctx: jax_compat.LoweringRuleContext, *operands: Any, function: Function, specs: Any, ordered: bool, **_: Any
) -> Any:
    """Where there is no native handler: on other platforms than CPU, and where XLA partitions the program."""
    if ordered and jax_compat.is_partitioned(ctx):
        raise NotImplementedError(
            f"XLA splits the program that calls host function `{function.name}` over devices, where it keeps no order. "
            "Use ordered=False, or jax.shard_map around the call."
        )

    def callback(*args: Any) -> list[np.ndarray]:
        run = functools.partial(function, [np.array(arg) for arg in args], specs)
        try:
            return run() if function.timeout is None else _run_with_timeout(run, function.timeout)
        except BaseException as error:
            raise CallError(_message(function, error)) from error

    return jax_compat.emit_python_call(ctx, callback, operands, OrderedTapEffect() if ordered else None)


def _call_lowering(
    ctx: jax_compat.LoweringRuleContext, *operands: Any, function: Function, specs: Any, ordered: bool, **_: Any
) -> Any:
    if ctx.module_context.lowering_parameters.for_export:
        raise NotImplementedError(
            f"the program that calls host function `{function.name}` cannot be exported: who reads it would have to "
            "wait for a function that is not there. Tap the value (`id_tap` can be exported), or export what comes "
            "before and after the call"
        )
    if jax_compat.is_partitioned(ctx) or not jax_compat.is_for_cpu(ctx):
        return _callback_lowering(ctx, *operands, function=function, specs=specs, ordered=ordered)
    reference = _route(function, arguments.specs(ctx.avals_in, function.keys), specs)
    # The route must live until XLA has instantiated the call; from then on the executable holds it.
    jax_compat.add_keepalive(ctx, reference)
    jax_compat.dispatch_synchronously(ctx)
    header = np.frombuffer(encode_header(reference.route.header), np.uint32)
    effect = OrderedTapEffect() if ordered else None
    return jax_compat.emit_ffi_call(ctx, "ceedtap_call", operands, effect, avals_out=ctx.avals_out, header=header)


jax_compat.lower_in_place(call_p, _call_lowering)


@call_p.def_effectful_abstract_eval
def _call_abstract_eval(
    *avals: Any, specs: tuple[ArraySpec, ...], ordered: bool, **_: Any
) -> tuple[list[Any], set[Any]]:
    outs = [jax_compat.result_aval(call_p, spec.shape, spec.dtype, avals) for spec in specs]
    return outs, {OrderedTapEffect() if ordered else TapEffect()}


def _call_batching(args: Any, dims: Any, *, specs: tuple[ArraySpec, ...], vmap: str, **params: Any) -> Any:
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if vmap == "batched":
        args = [
            jnp.broadcast_to(arg, (size, *arg.shape)) if dim is None else jnp.moveaxis(arg, dim, 0)
            for arg, dim in zip(args, dims, strict=True)
        ]
        specs = tuple(ArraySpec((size, *spec.shape), spec.dtype) for spec in specs)
        outs = call_p.bind(*args, specs=specs, vmap=vmap, **params)
    else:

        def lane(batched: list[Any]) -> list[Any]:
            lanes = iter(batched)
            merged = [arg if dim is None else next(lanes) for arg, dim in zip(args, dims, strict=True)]
            return call_p.bind(*merged, specs=specs, vmap=vmap, **params)

        outs = jax.lax.map(lane, [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None])
    return outs, [0] * len(outs)


def _call_jvp(primals: Any, tangents: Any, *, function: Function, **_: Any) -> Any:
    raise TypeError(
        f"the call of host function `{function.name}` is differentiated, and JAX cannot look into it. Give "
        "ceedtap.call its derivative, jvp=f(primals, tangents) or vjp=(forward, backward), or stop "
        "differentiation at its arguments with jax.lax.stop_gradient."
    )


jax_compat.primitive_batchers[call_p] = _call_batching
jax_compat.primitive_jvps[call_p] = _call_jvp
