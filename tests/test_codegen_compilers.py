"""Generated files are C, C++ and CUDA; their loops vectorise."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import jax.scipy.special as jsp
import numpy as np
import pytest
from codegen_helpers import include_dir, source_of, standalone
from jax import lax

from ceedtap.toolchain import FLAGS

M, V, S = (3, 3), (3,), ()


TABLE = jnp.asarray(np.arange(40.0))


def psi(f):
    j = jnp.linalg.det(f)
    return 0.5 * (jnp.sum(f * f) - 3) - jnp.log(j) + 0.5 * jnp.log(j) ** 2


def neo_hookean(g, w):
    return w * jax.grad(psi)(jnp.eye(3) + 0.1 * g)


def layer(x):
    return jnp.tanh(jnp.asarray(np.sin(np.arange(2048.0)).reshape(32, 64)) @ jnp.tile(x, 32)[:64])


SAMPLE = {
    "neo-Hookean": (neo_hookean, M, S),
    "tangent": (lambda g, d: jax.jvp(lambda g: neo_hookean(g, 1.0), (g,), (d,))[1], M, M),
    "transcendental": (lambda x: (jnp.exp(x), jnp.sin(x), jnp.hypot(x, 1.0), jnp.arctan2(x, 2.0), abs(x) ** x), S),
    "written out": (lambda x: (jnp.log(x), jnp.log1p(x), jnp.expm1(x), jnp.tanh(x), jax.nn.sigmoid(x)), S),
    "rounding": (lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), lax.round(x), jnp.mod(x, 3.0)), S),
    "integers": (lambda x: [jnp.int32(x) // 3, jnp.uint8(x) << 2, jnp.int64(x) >> 1, lax.clz(jnp.int16(x))], S),
    "nan and infinity": (lambda x: jnp.where(x > 0, jnp.nan, jnp.where(x < -1, -jnp.inf, x)), S),
    "single precision": (lambda x: jnp.float32(x) * jnp.sin(jnp.float32(0.1)) + jnp.exp(jnp.float32(x)), S),
    "complex": (lambda x: jnp.abs(jnp.sqrt(lax.complex(x, x + 1)) / lax.complex(1.0, x)), S),
    "loops": (lambda x: lax.fori_loop(0, 1000, lambda i, c: jnp.sin(c) + x, x), S),
    "while": (lambda x: lax.while_loop(lambda c: c < 50, lambda c: c * 1.5 + 0.1, abs(x)), S),
    "scan": (lambda x: lax.scan(lambda c, a: (c * 0.5 + a, c * a), x, jnp.arange(500.0)), S),
    "branches": (lambda x: lax.cond(x > 0, lambda x: lax.fori_loop(0, 999, lambda i, c: c * x, x), jnp.sin, x), S),
    "gather": (lambda x, i: (x[jnp.int32(i)], x.at[jnp.int32(i)].add(2.0), TABLE[jnp.int32(i)]), V, S),
    "sort": (lambda x: (jnp.sort(x), jnp.argmax(x), lax.top_k(x, 2)), V),
    "linear algebra": (lambda a: (jnp.linalg.inv(a), jnp.linalg.eigh(a), jnp.linalg.svd(a), jsl.expm(a)), M),
    "qr": (jnp.linalg.qr, M),
    "large eigh": (lambda a: jnp.linalg.eigh(jnp.kron(a, a)[:6, :6]), M),
    "schur": (lambda a: (jsl.sqrtm(a).real, jnp.linalg.eig(a)[1].imag), M),
    "network": (lambda x: jax.grad(lambda x: jnp.sum(layer(x)))(x), V),
    "special": (lambda x: (lax.digamma(x), lax.igamma(2.0, x), jsp.betainc(1.0, 2.0, x), lax.erf_inv(x)), S),
    "more special": (lambda x: (lax.zeta(2.0, x), lax.bessel_i1e(x), lax.lgamma(x)), S),
    "bits": (lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int64) | 1, jnp.float64), S),
    "layer": (layer, V),
    "nothing used": (lambda x: jnp.zeros(2), S),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources():
    return {name: source_of(*args, name=f"f{i}") for i, (name, args) in enumerate(SAMPLE.items())}


def _includes():
    directory = include_dir()
    if directory is None:
        pytest.skip("this libCEED comes without headers")
    return Path(directory)


@pytest.mark.parametrize(("compiler", "language"), [("gcc", "c"), ("g++", "c++"), ("clang", "c")])
def test_compiles_without_a_warning(compiler, language, sources, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    includes = _includes()
    units = []
    for i, source in enumerate(sources.values()):
        (tmp_path / f"f{i}.h").write_text(source)
        unit = tmp_path / (f"f{i}.c" if language == "c" else f"f{i}.cpp")
        # Twice, as libCEED may do; the function is static in libCEED's headers, and its context is for others.
        unit.write_text(f'#include <ceed/types.h>\n#include "f{i}.h"\n#include "f{i}.h"\n')
        units.append(str(unit))
    flags = ["-std=gnu11"] if language == "c" else ["-std=c++17"]
    allowed = ["-Wno-unused-parameter", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-unused-variable"]
    command = [compiler, *flags, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", *allowed, f"-I{includes}", *units]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]


def _nvrtc():
    spec = importlib.util.find_spec("nvidia")
    found = [
        p
        for root in (spec.submodule_search_locations if spec else [])
        for p in Path(root).glob("cuda_nvrtc/lib/libnvrtc.so.12")
    ]
    if not found:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    return ctypes.CDLL(str(found[0]))


def test_compiles_for_cuda(sources, tmp_path):
    """With libCEED's JIT headers before it."""
    nvrtc, includes = _nvrtc(), _includes()
    if not (includes / "ceed/jit-source/cuda/cuda-jit.h").is_file():
        pytest.skip("this libCEED comes without JIT headers")
    for header in ("stddef.h", "stdint.h", "stdbool.h"):  # libCEED's loader drops these lines
        (tmp_path / header).write_text("")
    joined = "".join(s.replace("#pragma once\n", "") for s in sources.values())
    calls = "".join(f"  f{i}(ctx, 1, in, out);\n" for i in range(len(sources)))
    arguments = "void *ctx, const CeedScalar *const *in, CeedScalar *const *out"
    text = (
        "#include <ceed/jit-source/cuda/cuda-jit.h>\n#include <ceed/types.h>\n"
        f'{joined}extern "C" __global__ void kernel({arguments}) {{\n{calls}}}\n'
    )
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"file.cu", 0, None, None) == 0
    options = [f"-I{tmp_path}", f"-I{includes}", "-arch=compute_80", "-std=c++17", "-default-device"]
    options += ["-DCEED_RUNNING_JIT_PASS=1", "-Dint32_t=int"]
    encoded = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    rc = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert rc == 0, log.value.decode()[:4000]


@pytest.mark.parametrize("word", ["INFINITY", "NAN", "M_PI", "int64_t", "uint32_t", "restrict ", "goto"])
def test_words_that_gpu_compilers_lack(word, sources):
    assert not [name for name, s in sources.items() if word in s.replace("__restrict__", "")]


UNARY = "acos acosh asin asinh atan atanh cbrt cos cosh erf erfc exp exp2 expm1 log log1p sin sinh sqrt tan tanh"


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("gcc") is None,
    reason="gcc on x86-64 Linux",
)
def test_loops_vectorise(tmp_path):
    """gcc says so of every loop over points, with the flags that are used."""
    if tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35):
        pytest.skip("this glibc has no vector functions")
    functions = {name: (lambda x, name=name: getattr(lax, name)(x), S) for name in UNARY.split()}
    functions |= {
        "pow": (lambda x, y: x**y, S, S),
        "atan2": (jnp.arctan2, S, S),
        "floor": (lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), lax.round(x)), S),
        "choice": (lambda x: jnp.where(x > 0, jnp.exp(x), jnp.maximum(x, -1.0)), S),
        "sort": (jnp.sort, (2,)),
        "neo-Hookean": SAMPLE["neo-Hookean"],
        "inverse": (lambda a: (jnp.linalg.inv(a), jnp.linalg.cholesky(a @ a.T)), M),
        "eigh": (jnp.linalg.eigh, M),
        "pivots": (jax.grad(lambda a: jnp.linalg.slogdet(a)[1]), (4, 4)),
        "small choice": (lambda x, i: (x[jnp.int32(i)], x.at[jnp.int32(i)].add(2.0)), V, S),
    }  # fmt: skip
    missed = []
    for i, (name, (function, *shapes)) in enumerate(functions.items()):
        unit = tmp_path / f"f{i}.c"
        unit.write_text(standalone(source_of(function, *shapes)))
        flags = [f for f in FLAGS if f not in ("-march=native", "-shared")]
        command = ["gcc", *flags, "-mavx2", "-mfma", "-fopt-info-vec", "-c", str(unit), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        line = next(k for k, text in enumerate(unit.read_text().splitlines(), 1) if "CeedInt i = 0" in text)
        if not any(s.split(":")[1] in (str(line), str(line + 1)) and "loop vectorized" in s for s in said.splitlines()):
            missed.append(name)
    assert missed == []
