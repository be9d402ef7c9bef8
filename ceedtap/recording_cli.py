"""The commands that look at recordings and publications: ``follow | replay | info | export``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any


def add_commands(commands: Any) -> None:
    """Adds the commands to those of ``ceedtap``."""
    follow = commands.add_parser(
        "follow",
        help="show a live table of what a process publishes",
        description="Shows a live table of what a running process publishes with ceedtap.publish(NAME): taps, rates, "
        "last values, and the history of a norm. The process does not wait for it.",
    )
    follow.add_argument("name", metavar="NAME")
    follow.add_argument("--tap", metavar="TAP", action="append", help="only this tap; may be given again")
    follow.add_argument("--norm", choices=["l2", "l1", "max", "mean"], default="l2", help="(default: l2)")
    follow.add_argument("--interval", metavar="SEC", type=_positive, default=0.5, help="(default: 0.5)")
    follow.add_argument("--plain", action="store_true", help="plain text, a table for each interval")
    follow.add_argument("--once", action="store_true", help="one table in plain text, after one interval")
    follow.add_argument("--wait", action="store_true", help="wait until somebody publishes this name")
    follow.set_defaults(run=_follow)

    info = commands.add_parser(
        "info",
        help="say what is in a recording, and whether it is damaged",
        description="Says what is in a recording and compares all checksums. The exit status is 1 when it is damaged.",
    )
    info.add_argument("file", metavar="FILE")
    info.set_defaults(run=_info)

    replay = commands.add_parser(
        "replay", help="print the events of a recording", description="Prints the events of a recording."
    )
    replay.add_argument("file", metavar="FILE")
    replay.add_argument("--tap", metavar="TAP", action="append", help="only this tap; may be given again")
    replay.add_argument("--speed", metavar="X", type=_positive, help="1: at the recorded pace (default: at once)")
    replay.set_defaults(run=_replay)

    export = commands.add_parser(
        "export",
        help="write recorded events to a file of another format",
        description="Writes the events of a tap to a file whose suffix says the format: .npz, .nc, .zarr, .parquet, or "
        ".pvd (VTU files for ParaView).",
    )
    export.add_argument("file", metavar="FILE")
    export.add_argument("output", metavar="OUTPUT")
    export.add_argument("--tap", metavar="TAP", help="needed where there are several")
    export.add_argument("--array", metavar="NAME", help="one of the arrays of an event (default: all)")
    export.add_argument("--device", metavar="N", type=int, help="only what ran on this device")
    export.add_argument(
        "--transforms", metavar="NAMES", default="", help="such as jvp,transpose for cotangents (default: none)"
    )
    export.add_argument("--mesh", metavar="MESH", help="for .pvd: the file with the mesh, in any format of meshio")
    export.set_defaults(run=_export)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number is needed, got {text}")
    return value


def _complain(command: str, error: BaseException) -> int:
    text = error.args[0] if isinstance(error, KeyError) else error
    print(f"ceedtap {command}: {text}", file=sys.stderr)
    return 1


def _follow(args: argparse.Namespace) -> int:
    from ceedtap import live_table

    if args.own_process:
        if hasattr(os, "nice"):
            os.nice(10)  # what is followed comes first
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return live_table.run(
            args.name, norm=args.norm, taps=args.tap, interval=args.interval, plain_text=args.plain, once=args.once,
            wait=args.wait,
        )  # fmt: skip
    except (ImportError, ConnectionError) as error:
        return _complain("follow", error)


def _info(args: argparse.Namespace) -> int:
    from ceedtap import recording_summary
    from ceedtap.recording import open as open_recording
    from ceedtap.recording_format import RecordingError

    try:
        with open_recording(args.file) as run:
            print(recording_summary.text(run))
            return 1 if run.damage else 0
    except (OSError, RecordingError) as error:
        return _complain("info", error)


def _replay(args: argparse.Namespace) -> int:
    from ceedtap.recording_format import RecordingError
    from ceedtap.recording_replay import print_event, replay

    consumers = None if args.tap is None else dict.fromkeys(args.tap, print_event)
    try:
        replay(args.file, consumers, speed=args.speed)
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except (OSError, KeyError, RecordingError) as error:
        return _complain("replay", error)
    return 0


def _export(args: argparse.Namespace) -> int:
    from ceedtap.recording import open as open_recording
    from ceedtap.recording_format import RecordingError

    try:
        with open_recording(args.file) as run:
            if args.tap is None and len(run) != 1:
                raise ValueError(f"choose one of the taps with --tap: {', '.join(run) or 'there are none'}")
            series = run[args.tap or next(iter(run))]
            if args.array is not None:
                series = series[args.array]
            names = tuple(name for name in args.transforms.split(",") if name)
            series = series.select(device=args.device, transforms=names)
            mesh = None
            if args.mesh is not None:
                from ceedtap.mesh import read

                mesh = read(args.mesh)
            series.export(args.output, mesh=mesh)
            print(f"{len(series)} events of {series.tap} in {args.output}")
    except (OSError, KeyError, ValueError, ImportError, RecordingError) as error:
        return _complain("export", error)
    return 0
