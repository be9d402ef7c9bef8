"""Feeding recorded events to consumers again."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ceedtap import outfeed
from ceedtap.consumer import Consumer, failures_of
from ceedtap.primitive import print_values
from ceedtap.recording import Event, event
from ceedtap.recording_definition import Definition
from ceedtap.recording_format import RecordingError
from ceedtap.recording_reader import FrameFile
from ceedtap.routes import local_devices


def replay(
    path: str | os.PathLike[str],
    consumers: Mapping[str, Callable[..., Any]] | Callable[..., Any] | None = None,
    *,
    speed: float | None = None,
) -> int:
    """Calls consumers with the events of a recording, in the recorded order and with the arguments that they got.

    Args:
        path: a file of :func:`ceedtap.record`.
        consumers: functions, :class:`ceedtap.Consumer` or :class:`ceedtap.Tap` objects by the names of taps; other
            events are skipped. A single function gets all events. None prints them like :func:`ceedtap.id_print`.
        speed: None: as fast as possible. 1.0 keeps the recorded pace, 2.0 is twice as fast.

    Returns:
        The number of events that were delivered.

    Raises:
        KeyError: the recording has no tap of such a name.
        CallbackException: consumers raised; it holds their exceptions, and all other events have been delivered.
        RecordingError: the recording is damaged; what comes before has been delivered.

    >>> import ceedtap as ct, tempfile
    >>> path = tempfile.mkdtemp() + "/run.ctap"
    >>> with ct.record(path):
    ...     _ = ct.id_tap(lambda x, what: None, 42.0, what="answer")
    >>> ct.replay(path, {"answer": lambda x, what: print(what, x)})
    answer 42.0
    1
    """
    if speed is not None and not speed > 0:
        raise ValueError(f"replay: speed is a positive number or None, got {speed!r}")
    file = FrameFile(path)
    try:
        targets = _targets(file, consumers)
        errors = outfeed.Errors()
        count, begin = 0, None
        for number, kind in enumerate(file.kinds.tolist()):
            consumer = targets[kind]
            if consumer is None or not consumer.enabled:
                continue
            try:
                happened = event(file, number)
            except RecordingError as error:
                if (failures := errors.take()) is not None:
                    error.add_note(f"before that, {failures}")
                raise
            if speed is not None:
                begin = begin or time.monotonic() - happened.time_ns / 1e9 / speed
                time.sleep(max(0.0, begin + happened.time_ns / 1e9 / speed - time.monotonic()))
            try:
                consumer(*happened.args, **_kwargs(happened, file.definitions[kind], consumer.func is print_event))
            except Exception as error:
                _keep(errors, consumer, error, happened)
            count += 1
    finally:
        file.close()
    if (raised := errors.take()) is not None:
        raise raised
    return count


def print_event(*args: Any, what: str, threshold: int | None = None, **labels: Any) -> None:
    """Prints an event like :func:`ceedtap.id_print`."""
    labels.pop("output_stream", None)
    print_values(*args, what=what, threshold=threshold, output_stream=None, **labels)


def _targets(file: FrameFile, consumers: Any) -> list[Consumer | None]:
    """For each definition, who gets its events."""
    names = [definition.tap for definition in file.definitions]
    if consumers is None or callable(consumers):
        return [_consumer(consumers or print_event)] * len(names)
    if unknown := sorted(set(consumers) - set(names)):
        there = ", ".join(map(repr, dict.fromkeys(names))) or "none"
        raise KeyError(f"{file.path} has no tap {', '.join(map(repr, unknown))}; its taps: {there}")
    by_name = {name: _consumer(func) for name, func in consumers.items()}
    return [by_name.get(name) for name in names]


def _consumer(func: Callable[..., Any]) -> Consumer:
    return func if isinstance(func, Consumer) else Consumer(func)


def _kwargs(happened: Event, definition: Definition, printing: bool) -> dict[str, Any]:
    kwargs = dict(happened.labels)
    if happened.transforms:
        kwargs["transforms"] = happened.transforms
    if printing:
        return {"what": happened.tap, **kwargs}
    if definition.with_device:
        kwargs["device"] = local_devices().get(happened.device)
    if definition.with_shard and happened.shard is not None:
        kwargs["shard"] = dataclasses.replace(happened.shard, device=local_devices().get(happened.device))
    return kwargs


def _keep(errors: outfeed.Errors, consumer: Consumer, error: Exception, happened: Event) -> None:
    note = f"raised by consumer {consumer.name} for event {happened.seq} of {happened.tap}"
    for who, exception in failures_of(consumer, error):
        exception.add_note(note)
        if who.on_error == "log":
            outfeed.logger.error(note, exc_info=exception)
            continue
        if who.on_error == "disable":
            who.enable(False)
        errors.add(exception)
