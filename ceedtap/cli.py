"""The command line: ``ceedtap demo | doctor | install-libceed | cache | follow | replay | info | export``.

Every command imports what it needs when it runs, so that ``ceedtap doctor`` starts where other parts are broken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence


def _demo(args: argparse.Namespace) -> int:
    from ceedtap import demo

    return demo.main(
        mesh=args.mesh,
        degree=args.degree,
        output=args.output,
        resource=args.ceed,
        rtol=args.rtol,
        max_iterations=args.max_iterations,
    )


def _doctor(args: argparse.Namespace) -> int:
    from ceedtap import doctor

    return doctor.main()


def _install_libceed(args: argparse.Namespace) -> int:
    from ceedtap import ceed_ffi, install

    if not args.force:
        try:
            library = ceed_ffi.load()
        except ImportError:
            pass
        else:
            print(f"libCEED {library.version} is there already: {library.path} (from {library.origin})")
            return 0
    try:
        install.install_libceed(force=args.force)
    except install.InstallError as error:
        print(f"ceedtap install-libceed: {error}", file=sys.stderr)
        return 1
    return 0


def _cache(args: argparse.Namespace) -> int:
    from ceedtap.cache import cache_dir

    try:
        directory = cache_dir()
    except OSError as error:
        print(f"ceedtap cache: {error}", file=sys.stderr)
        return 1
    print(directory)
    kinds = {"objects": "compiled QFunctions", "backends": "which backends work", "libceed": "downloaded libCEED"}
    for name, what in kinds.items():
        files = [path for path in (directory / name).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        line = f"  {name:<8} {what}: {len(files)} file{'s' * (len(files) != 1)}, {size:.1f} MB"
        if args.action == "clear" and files and (args.all or name != "libceed"):
            try:
                shutil.rmtree(directory / name)
            except OSError as error:
                print(f"ceedtap cache: {error}", file=sys.stderr)
                return 1
            line += ", removed"
        print(line)
    return 0


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a positive integer is needed, got {text}")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"a number between 0 and 1 is needed, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    from ceedtap import __version__, recording_cli

    parser = argparse.ArgumentParser(
        prog="ceedtap", description="libCEED operators inside JAX programs, and taps that stream arrays out of them."
    )
    parser.add_argument("--version", action="version", version=f"ceedtap {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="solve Poisson's equation, libCEED inside one compiled JAX program",
        description="Solves Poisson's equation with a known solution by conjugate gradients: one compiled JAX program "
        "that calls libCEED and taps the residual of every iteration. Writes demo.vtu and demo.png.",
    )
    demo.add_argument("--mesh", metavar="FILE", help="run on this mesh (any format of meshio), not on the two own ones")
    demo.add_argument("--degree", metavar="P", type=_positive_int, default=3, help="polynomial degree (default: 3)")
    demo.add_argument("--output", metavar="DIR", default=".", help="where the files go (default: here)")
    demo.add_argument("--ceed", metavar="RESOURCE", default="/cpu/self", help="libCEED backend (default: /cpu/self)")
    demo.add_argument(
        "--rtol", metavar="TOL", type=_tolerance, default=1e-10, help="relative residual to reach (default: 1e-10)"
    )
    demo.add_argument("--max-iterations", metavar="N", type=_positive_int, default=2000, help="(default: 2000)")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser(
        "doctor",
        help="say what was found, what is missing and how to get it",
        description="Checks Python, JAX, the native part, libCEED and the C compiler, and makes a small trial run. "
        "The exit status is 1 when the main job cannot run.",
    )
    doctor.set_defaults(run=_doctor)

    install = commands.add_parser(
        "install-libceed",
        help="download libCEED, where it is not there already",
        description="Downloads the official wheel of libCEED with pip and keeps its library in the user's cache. "
        "It works with every Python. Nothing is done where ceedtap finds a libCEED already.",
    )
    install.add_argument("--force", action="store_true", help="download it in any case")
    install.set_defaults(run=_install_libceed)

    cache = commands.add_parser(
        "cache", help="show or clear the cache", description="Shows what is in the user's cache, or clears it."
    )
    cache.add_argument("action", choices=["info", "clear"])
    cache.add_argument("--all", action="store_true", help="clear the downloaded libCEED as well")
    cache.set_defaults(run=_cache)

    recording_cli.add_commands(commands)
    return parser


@contextlib.contextmanager
def _prompt_interrupts() -> Iterator[None]:
    """Lets Ctrl-C end the process while the main thread is in compiled code, where Python cannot raise anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left = threading.Event()
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def watch() -> None:
        with reading:
            while number := reading.recv(1):
                if number[0] == signal.SIGINT and not left.wait(1.0):
                    os.write(2, b"\ninterrupted\n")
                    os._exit(130)

    threading.Thread(target=watch, name="ceedtap-interrupt", daemon=True).start()
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        writing.close()  # ends the thread


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        args = _parser().parse_args(argv)
        args.own_process = argv is None
        with _prompt_interrupts():
            return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `ceedtap doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
