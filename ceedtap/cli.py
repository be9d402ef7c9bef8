"""The command line: ``ceedtap demo | doctor | install-libceed | cache``.

Every command imports what it needs when it runs, so that ``ceedtap doctor`` starts where other parts are broken.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


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
    from ceedtap import __version__

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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        args = _parser().parse_args(argv)
        return int(args.run(args))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `ceedtap doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
