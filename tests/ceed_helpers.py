"""What the tests of libCEED's objects share."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

from ceedtap import ceed as ct
from ceedtap.ceed_backends import backends
from ceedtap.ceed_ffi import load
from ceedtap.toolchain import find_compiler

FOUND = backends(load())
#: The backends that every libCEED has and that work on this machine.
BACKENDS = [
    name
    for kind in ("ref", "opt", "avx")
    for block in ("serial", "blocked")
    if (name := f"/cpu/self/{kind}/{block}") in FOUND.working
]
#: What ``/cpu/self`` means here.
FASTEST = ct.Ceed("/cpu/self").get_resource()
TESTS = Path(__file__).parent


def run_python(code: str, timeout: float = 120, **env: str | None) -> subprocess.CompletedProcess:
    """Runs code in a process of its own; an environment variable of None is removed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))}
    environment.update({name: value for name, value in env.items() if value is not None})
    for name in (name for name, value in env.items() if value is None):
        environment.pop(name, None)
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def check_python(code: str, timeout: float = 120, **env: str | None) -> str:
    """As run_python; fails unless the process ends well and silently on stderr. Returns what it printed."""
    result = run_python(code, timeout, **env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def lobatto(n):
    """Gauss-Lobatto nodes: the ends and the roots of the derivative of Legendre's polynomial."""
    inner = np.polynomial.legendre.Legendre.basis(n - 1).deriv().roots()
    return np.concatenate([[-1.0], np.sort(inner.real), [1.0]])


def lagrange(nodes, points):
    """Values and derivatives of the Lagrange polynomials on `nodes` at `points`: two arrays (points, nodes)."""
    values, derivatives = np.empty((2, len(points), len(nodes)))
    for j, node in enumerate(nodes):
        others = np.delete(nodes, j)
        polynomial = np.polynomial.Polynomial.fromroots(others) / np.prod(node - others)
        values[:, j], derivatives[:, j] = polynomial(points), polynomial.deriv()(points)
    return values, derivatives


def array_of(vector):
    """A copy of a vector's data."""
    with vector.array_read() as values:
        return values.copy()


def vector_of(ceed, values):
    """A vector with given data."""
    vector = ceed.Vector(np.size(values))
    vector.set_array(np.asarray(values, dtype=np.float64))
    return vector


class Mass1D:
    """A mass operator on `n` line elements of degree 2 on random nodes, and its matrix by numpy."""

    def __init__(self, ceed, n=11, seed=0, qfunction=None):
        rng = np.random.default_rng(seed)
        self.ceed, self.n, self.lsize = ceed, n, 2 * n + 1
        self.points, self.weights = np.polynomial.legendre.leggauss(4)
        self.offsets = np.arange(3) + 2 * np.arange(n)[:, None]
        lengths = rng.uniform(0.5, 2, n)
        self.data = self.weights * lengths[:, None] / 2
        self.restriction = ceed.ElemRestriction(n, 3, 1, 1, self.lsize, self.offsets)
        self.strided = ceed.StridedElemRestriction(n, 4, 1, 4 * n, [1, 4, 4])
        self.basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        self.qdata = vector_of(ceed, self.data)
        self.op = ceed.Operator(qfunction or ceed.QFunctionByName("MassApply"))
        self.op.set_field("u", self.restriction, self.basis, ct.VECTOR_ACTIVE)
        self.op.set_field("qdata", self.strided, ct.BASIS_NONE, self.qdata)
        self.op.set_field("v", self.restriction, self.basis, ct.VECTOR_ACTIVE)
        values = lagrange(lobatto(3), self.points)[0]
        self.matrix = np.zeros((self.lsize, self.lsize))
        for offsets, data in zip(self.offsets, self.data, strict=True):
            self.matrix[np.ix_(offsets, offsets)] += values.T @ np.diag(data) @ values


# In front of libCEED: the application of a basis dies where the backend's name has a given text in it.
DIES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef int (*Apply)(void *, int, int, int, void *, void *);
int CeedBasisGetCeed(void *, void **);
int CeedGetParent(void *, void **);
int CeedGetResource(void *, const char **);
int CeedBasisApply(void *basis, int num_elem, int t_mode, int eval_mode, void *u, void *v) {
  void *ceed;
  const char *resource;
  CeedBasisGetCeed(basis, &ceed);
  CeedGetParent(ceed, &ceed);  // of a backend that has others do a part of its work
  CeedGetResource(ceed, &resource);
  if (strstr(resource, WHERE) && num_elem == 1) { HOW; }
  return ((Apply)dlsym(RTLD_NEXT, "CeedBasisApply"))(basis, num_elem, t_mode, eval_mode, u, v);
}
"""


def library_that_dies(directory, where="/avx", how="__builtin_trap()"):
    """The path of a libCEED in which a backend dies."""
    path = directory / f"libceed-{abs(hash((where, how)))}.so"
    command = [*find_compiler().command, "-shared", "-fPIC", "-xc", "-", "-xnone", load().path]
    command += [f'-DWHERE="{where}"', f"-DHOW={how}", f"-Wl,-rpath,{os.path.dirname(load().path)}", "-o", str(path)]
    subprocess.run([*command, "-ldl"], input=DIES, text=True, check=True)
    return str(path)
