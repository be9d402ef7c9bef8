"""Tries the backends of a libCEED in processes of their own; started by :mod:`ceedtap.ceed_backends`.

Code for another processor ends the process that runs it, and a broken library may hang or abort: nothing of that is
found out without running it. This file is a program: it imports nothing of ceedtap, so that it starts in a few
hundredths of a second, and loads the library in children only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from ctypes import byref, c_char_p, c_int, c_ssize_t, c_void_p
from typing import Any

#: What a child ends with: everything was tried; the library has no such backend; it cannot be loaded; the trial failed.
WORKS, ABSENT, NO_LIBRARY, FAILED = 0, 10, 11, 12

#: A child that takes longer, in seconds, hangs.
LIMIT_SEC = 20

_LINE, _TRIANGLE = 65536, 131073  # element topologies; only the dimension in the upper half matters
_INTERP, _GRAD, _WEIGHT = 1, 2, 16
_GAUSS = 0
_HOST, _COPY = 0, 0


class _Trial:
    """All kinds of work that a backend does, in small sizes: single elements and blocks, and what is left over of them.

    Errors that libCEED returns are none of our business here; a function that this version lacks is left out.
    """

    def __init__(self, library: Any, ceed: c_void_p) -> None:
        self.library, self.ceed = library, ceed
        precision = c_int()
        library.CeedGetScalarType(byref(precision))
        self.scalar: Any = ctypes.c_double if precision.value else ctypes.c_float

    def call(self, name: str, *args: Any) -> bool:
        function = getattr(self.library, name, None)
        return function is not None and function(*args) == 0

    def make(self, name: str, *args: Any) -> c_void_p | None:
        """A new object; None where there is none."""
        box = c_void_p()
        return box if self.call(name, *args, byref(box)) and box.value else None

    def constant(self, name: str) -> c_void_p:
        return c_void_p.in_dll(self.library, name)

    def scalars(self, values: Any) -> Any:
        values = list(values)
        return (self.scalar * len(values))(*values)

    def vector(self, size: int) -> c_void_p | None:
        vector = self.make("CeedVectorCreate", self.ceed, c_ssize_t(size))
        values = self.scalars(0.5 + 0.25 * (i % 7) for i in range(size))
        return vector if vector and self.call("CeedVectorSetArray", vector, _HOST, _COPY, values) else None

    def everything(self) -> None:
        self.vectors()
        for dim in (1, 2, 3):
            for ncomp in (1, 3):
                for nodes, points in ((2, 3), (3, 5), (5, 2)):
                    basis = self.make(
                        "CeedBasisCreateTensorH1Lagrange", self.ceed, dim, ncomp, nodes, points, _GAUSS
                    )  # fmt: skip
                    self.basis(basis, dim, ncomp, nodes**dim, points**dim)
        for nodes, points in ((3, 4), (6, 3)):
            values = self.scalars(0.25 + 0.125 * (i % 5) for i in range(2 * nodes * points))
            basis = self.make(
                "CeedBasisCreateH1", self.ceed, _TRIANGLE, 2, nodes, points, values, values, values, values
            )  # fmt: skip
            self.basis(basis, 2, 2, nodes, points)
        for num_elem in (1, 9):
            self.operator(num_elem)

    def vectors(self) -> None:
        for size in (1, 7, 64):
            x, y, z = (self.vector(size) for _ in range(3))
            if not (x and y and z):
                return
            for kind in (0, 1, 2):
                self.call("CeedVectorNorm", x, kind, byref(self.scalar()))
            self.call("CeedVectorScale", x, self.scalar(0.5))
            self.call("CeedVectorAXPY", x, self.scalar(0.5), y)
            self.call("CeedVectorAXPBY", x, self.scalar(0.5), self.scalar(0.5), y)
            self.call("CeedVectorPointwiseMult", z, x, y)
            self.call("CeedVectorReciprocal", z)
            self.call("CeedVectorSetValue", z, self.scalar(0.5))

    def basis(self, basis: c_void_p | None, dim: int, ncomp: int, nodes: int, points: int) -> None:
        if not basis:
            return
        for num_elem in (1, 2, 8):
            at_nodes, at_points = self.vector(num_elem * ncomp * nodes), self.vector(num_elem * ncomp * points)
            gradients, weights = self.vector(num_elem * ncomp * points * dim), self.vector(num_elem * points)
            if not (at_nodes and at_points and gradients and weights):
                return
            for mode, there in ((_INTERP, at_points), (_GRAD, gradients)):
                self.call("CeedBasisApply", basis, num_elem, 0, mode, at_nodes, there)
                self.call("CeedBasisApply", basis, num_elem, 1, mode, there, at_nodes)
            none = self.constant("CEED_VECTOR_NONE")
            self.call("CeedBasisApply", basis, num_elem, 0, _WEIGHT, none, weights)

    def operator(self, num_elem: int) -> None:
        """A mass matrix on line elements of three nodes and four points: applied and assembled."""
        size, num_points = 2 * num_elem + 1, 4 * num_elem
        offsets = (c_int * (3 * num_elem))(*(2 * (i // 3) + i % 3 for i in range(3 * num_elem)))
        ceed, lsize = self.ceed, c_ssize_t(size)
        nodes = self.make("CeedElemRestrictionCreate", ceed, num_elem, 3, 1, 1, lsize, _HOST, _COPY, offsets)
        strides = (c_int * 3)(1, 4, 4)
        data = self.make("CeedElemRestrictionCreateStrided", ceed, num_elem, 4, 1, c_ssize_t(num_points), strides)
        basis = self.make("CeedBasisCreateTensorH1Lagrange", ceed, 1, 1, 3, 4, _GAUSS)
        qfunction = self.make("CeedQFunctionCreateInteriorByName", ceed, c_char_p(b"MassApply"))
        none, active = (self.constant(name) for name in ("CEED_QFUNCTION_NONE", "CEED_VECTOR_ACTIVE"))
        u, v, q = self.vector(size), self.vector(size), self.vector(num_points)
        if not (nodes and data and basis and qfunction and u and v and q):
            return
        operator = self.make("CeedOperatorCreate", ceed, qfunction, none, none)
        if not operator:
            return
        at_points = c_void_p.in_dll(self.library, "CEED_BASIS_NONE")
        request = self.constant("CEED_REQUEST_IMMEDIATE")
        for name, restriction, function, vector in (
            (b"u", nodes, basis, active), (b"qdata", data, at_points, q), (b"v", nodes, basis, active)
        ):  # fmt: skip
            if not self.call("CeedOperatorSetField", operator, c_char_p(name), restriction, function, vector):
                return
        self.call("CeedOperatorApply", operator, u, v, request)
        self.call("CeedOperatorApplyAdd", operator, u, v, request)
        self.call("CeedOperatorLinearAssembleDiagonal", operator, v, request)
        entries, rows, columns = c_ssize_t(), c_void_p(), c_void_p()
        if self.call("CeedOperatorLinearAssembleSymbolic", operator, byref(entries), byref(rows), byref(columns)):
            values = self.vector(entries.value)
            if values:
                self.call("CeedOperatorLinearAssemble", operator, values)


def _try(path: str, resource: str) -> int:
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return NO_LIBRARY
    # As for ceedtap.ceed_ffi.initialize: a name that the library knows, so that errors come with a Ceed.
    os.environ["CEED_ERROR_HANDLER"] = "store"
    ceed = c_void_p()
    failed = library.CeedInit(resource.encode(), byref(ceed))
    os.environ["CEED_ERROR_HANDLER"] = "return"
    if failed or not ceed.value:
        return ABSENT
    library.CeedSetErrorHandler(ceed, library.CeedErrorStore)
    _Trial(library, ceed).everything()
    return WORKS


def _in_child(limit_sec: int, path: str, resource: str) -> int:
    """What the child ended with: a status, or minus the signal that killed it."""
    child = os.fork()
    if not child:
        status = FAILED
        try:
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            try:
                import resource as limits

                limits.setrlimit(limits.RLIMIT_CORE, (0, 0))
            except (ImportError, OSError, ValueError):
                pass
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            signal.alarm(limit_sec)
            status = _try(path, resource)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    limit, library_path, *resources = sys.argv[1:]
    print(json.dumps({resource: _in_child(int(limit), library_path, resource) for resource in resources}))
