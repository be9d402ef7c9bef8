"""Functions that are called on the host: those that would be called and never run are refused."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

#: What a call returns in place of running.
_NOT_RUN = (types.CoroutineType, types.AsyncGeneratorType, types.GeneratorType)


def check_function(func: Callable[..., Any], what: str) -> None:
    """Refuses functions whose calls only make something that somebody else has to run: `async def`, and generators.

    Raises:
        TypeError: `func` is one of them, a method, a partial function or an object with such a ``__call__``.

    >>> async def send(x): ...
    >>> check_function(send, "a consumer")
    Traceback (most recent call last):
    TypeError: a consumer is called and must run at once, but send is a coroutine function, so its calls would never \
run; use a plain function, in which asyncio.run or asyncio.run_coroutine_threadsafe runs a coroutine
    """
    plain = func
    while isinstance(plain, functools.partial):
        plain = plain.func
    # Of an object the method of its class is called; of a class, that of the metaclass.
    for one in (plain, type(plain).__call__):
        for test, kind in (
            (inspect.iscoroutinefunction, "a coroutine function"),
            (inspect.isasyncgenfunction, "an asynchronous generator function"),
            (inspect.isgeneratorfunction, "a generator function"),
        ):
            if test(one):
                raise TypeError(_message(what, f"{_name(plain)} is {kind}", "its calls"))


def check_result(result: Any, func: Callable[..., Any], what: str) -> None:
    """Refuses what a function returns that :func:`check_function` could not see through, such as a lambda.

    Raises:
        TypeError: it is a coroutine or a generator.
    """
    if isinstance(result, _NOT_RUN):
        if isinstance(result, types.CoroutineType):
            result.close()  # else Python warns of it as well
        raise TypeError(_message(what, f"{_name(func)} has returned a {type(result).__name__}", "what is in it"))


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__qualname__", None) or type(func).__qualname__)


def _message(what: str, found: str, lost: str) -> str:
    return (
        f"{what} is called and must run at once, but {found}, so {lost} would never run; use a plain function, in "
        "which asyncio.run or asyncio.run_coroutine_threadsafe runs a coroutine"
    )
