"""``ceedtap demo``: Poisson's equation, solved by one compiled JAX program that calls libCEED.

The file is meant to be read: :func:`discretise` makes libCEED operators on a mesh, :func:`conjugate_gradients` is a
solver in JAX that taps its residuals, :func:`solve` puts them together. Any smooth function can be the exact solution:
JAX differentiates it for the right-hand side and for the errors.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ceedtap import lattice
from ceedtap.ceed import BASIS_NONE, ELEMRESTRICTION_NONE, VECTOR_ACTIVE, VECTOR_NONE, Ceed, Operator
from ceedtap.ceed_ffi import CeedError
from ceedtap.mesh import Mesh, MeshError, box, gradients, read
from ceedtap.operators import embed
from ceedtap.outfeed import outfeed_receiver
from ceedtap.primitive import id_tap
from ceedtap.space import Space

#: A smooth function of one point, (dim,) -> (), in JAX.
Function = Callable[[Any], Any]
#: Gets the number of the iteration and the relative norm of its residual while the program runs.
Watch = Callable[[Any, Any], None]

# -- libCEED: the operators ------------------------------------------------------------------------------------------


def discretise(space: Space) -> tuple[Operator, Operator]:
    """The stiffness and the mass operator of a scalar space, made of QFunctions that come with libCEED."""
    dim = space.dim
    stiffness = _operator(space, f"Poisson{dim}DBuild", f"Poisson{dim}DApply", ("du", "dv"), dim * (dim + 1) // 2)
    mass = _operator(space, f"Mass{dim}DBuild", "MassApply", ("u", "v"), 1)
    return stiffness, mass


def _operator(space: Space, build_name: str, apply_name: str, fields: tuple[str, str], num_data: int) -> Operator:
    ceed, geometry = space.ceed, space.geometry
    # What the geometry contributes at each quadrature point is computed once ...
    data_restriction = space.quadrature_restriction(num_data)
    data = ceed.Vector(space.mesh.num_cells * num_data * space.num_quadrature_points)
    points = ceed.Vector(geometry.lsize)
    points.set_array(space.mesh.points.reshape(-1))
    build = ceed.Operator(ceed.QFunctionByName(build_name))
    build.set_field("dx", geometry.restriction, geometry.basis, VECTOR_ACTIVE)
    build.set_field("weights", ELEMRESTRICTION_NONE, geometry.basis, VECTOR_NONE)
    build.set_field("qdata", data_restriction, BASIS_NONE, VECTOR_ACTIVE)
    build.apply(points, data)
    # ... and is a passive input of the operator.
    apply = ceed.Operator(ceed.QFunctionByName(apply_name))
    apply.set_field(fields[0], space.restriction, space.basis, VECTOR_ACTIVE)
    apply.set_field("qdata", data_restriction, BASIS_NONE, data)
    apply.set_field(fields[1], space.restriction, space.basis, VECTOR_ACTIVE)
    return apply


def diagonal(operator: Operator, size: int) -> np.ndarray:
    """The diagonal of the matrix of an operator, (size,), assembled by libCEED."""
    values = operator.ceed.Vector(size)
    operator.linear_assemble_diagonal(values)
    with values.array_read() as array:
        return np.array(array)


# -- JAX: the solver -------------------------------------------------------------------------------------------------


def conjugate_gradients(
    apply: Callable[[Array], Array],
    b: Array,
    inverse_diagonal: Array,
    watch: Watch,
    rtol: float | Array,
    max_iterations: int | Array,
) -> tuple[Array, Array, Array]:
    """Solves ``apply(x) = b`` by conjugate gradients with Jacobi's preconditioner, from x = 0.

    Args:
        apply: a symmetric positive definite operator, (n,) -> (n,).
        b: right-hand side, (n,).
        inverse_diagonal: of the operator, (n,).
        watch: is called on the host for every iteration, while the program runs.
        rtol: the norm of the residual to reach, relative to the one of `b`.
        max_iterations: the end in any case.

    Returns:
        x, the number of iterations, and the relative norm of the last residual.
    """
    scale = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)

    def unfinished(state: Any) -> Any:
        k, residual, *_ = state
        return (residual > rtol) & (k < max_iterations)  # a NaN ends the loop, too

    def step(state: Any) -> Any:
        k, _, x, r, p, rz = state
        ap = apply(p)
        alpha = rz / (p @ ap)
        x, r = x + alpha * p, r - alpha * ap
        z = inverse_diagonal * r
        rz, rz_before = r @ z, rz
        k, residual = id_tap(watch, k + 1, jnp.linalg.norm(r) / scale)
        return k, residual, x, r, z + rz / rz_before * p, rz

    z = inverse_diagonal * b
    k, residual = id_tap(watch, jnp.array(0), jnp.linalg.norm(b) / scale)
    k, residual, x, *_ = jax.lax.while_loop(unfinished, step, (k, residual, jnp.zeros_like(b), b, z, b @ z))
    return x, k, residual


# -- the problem -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """A solved problem.

    Attributes:
        name: of the mesh.
        space: the space of the solution.
        solution, exact: the computed and the exact solution at the nodes, (num_nodes,).
        residuals: relative residual norms, one for each iteration and the first one, as the taps brought them.
        converged: whether the last one is small enough.
        l2_error, h1_error: of the solution, in the L2 norm and the H1 seminorm.
        l2_norm, h1_norm: of the exact solution.
        seconds: wall-clock time of ``"setup"``, ``"compile"`` and ``"solve"``.
    """

    name: str
    space: Space
    solution: np.ndarray
    exact: np.ndarray
    residuals: np.ndarray
    converged: bool
    l2_error: float
    h1_error: float
    l2_norm: float
    h1_norm: float
    seconds: dict[str, float]

    @property
    def iterations(self) -> int:
        """Number of iterations of the solver."""
        return len(self.residuals) - 1


def ripples(mesh: Mesh) -> Function:
    """A smooth function with a few waves over the mesh, whatever its size and its place."""
    low, high = mesh.points.min(axis=0), mesh.points.max(axis=0)
    source, size = low - 0.1 * (high - low), (high - low).max()
    return lambda x: jnp.sin(4 * jnp.sum(((x - source) / size) ** 2))


def solve(
    mesh: Mesh,
    degree: int,
    *,
    name: str = "mesh",
    exact: Function | None = None,
    ceed: Ceed | None = None,
    rtol: float = 1e-10,
    max_iterations: int = 2000,
    watch: Watch | None = None,
) -> Result:
    """Solves -div grad u = f on a mesh, with u = `exact` on its boundary and f such that u is `exact` everywhere.

    Args:
        mesh: of two or three dimensions.
        degree: polynomial degree of the solution.
        name: for the result.
        exact: the exact solution; :func:`ripples` by default.
        ceed: where libCEED runs; "/cpu/self" by default.
        rtol: relative residual norm to reach.
        max_iterations: of the solver.
        watch: called on the host for every iteration while the program runs.

    Raises:
        TypeError: JAX is in single precision and libCEED is not; see `jax_enable_x64`.
        ceedtap.CallbackException: `watch` raised.
    """
    exact = ripples(mesh) if exact is None else exact
    started = time.perf_counter()
    space = Space(Ceed("/cpu/self") if ceed is None else ceed, mesh, degree)
    stiffness, mass = discretise(space)
    apply_stiffness = embed(stiffness, symmetric=True)
    apply_mass = embed(mass, symmetric=True)
    nodes = jnp.asarray(space.nodes)
    free = jnp.ones(space.lsize).at[space.boundary_nodes()].set(0.0)  # 1 in the interior, 0 where u is given
    inverse_diagonal = 1.0 / jnp.asarray(diagonal(stiffness, space.lsize))
    history: list[float] = []

    def on_residual(k: np.ndarray, residual: np.ndarray) -> None:
        history.append(float(residual))
        if watch is not None:
            watch(int(k), float(residual))

    @jax.jit
    def program(nodes: Array, free: Array, inverse_diagonal: Array) -> tuple[Array, Array]:
        u_exact = jax.vmap(exact)(nodes)
        f = jax.vmap(lambda x: -jnp.trace(jax.hessian(exact)(x)))(nodes)
        # Essential boundary conditions are masks: u = given + correction, and the correction is 0 on the boundary.
        given = (1 - free) * u_exact
        b = free * (apply_mass(f) - apply_stiffness(given))
        correction, _, _ = conjugate_gradients(
            lambda p: free * apply_stiffness(p), b, inverse_diagonal, on_residual, rtol, max_iterations
        )
        return given + correction, u_exact

    arguments = (nodes, free, inverse_diagonal)
    built = time.perf_counter()
    compiled = program.lower(*arguments).compile()
    ready = time.perf_counter()
    with outfeed_receiver(timeout_sec=None):
        solution, u_exact = jax.block_until_ready(compiled(*arguments))
    done = time.perf_counter()
    errors = error_norms(space, np.asarray(solution), exact)
    norms = error_norms(space, np.zeros(space.lsize), exact)
    return Result(
        name=name,
        space=space,
        solution=np.asarray(solution),
        exact=np.asarray(u_exact),
        residuals=np.array(history),
        converged=bool(history[-1] <= rtol),
        l2_error=errors[0],
        h1_error=errors[1],
        l2_norm=norms[0],
        h1_norm=norms[1],
        seconds={"setup": built - started, "compile": ready - built, "solve": done - ready},
    )


def error_norms(space: Space, u: np.ndarray, exact: Function) -> tuple[float, float]:
    """The L2 norm and the H1 seminorm of ``u - exact``.

    By a Gauss rule with ``degree + 3`` points per direction, and without libCEED: it checks libCEED's part, too.
    """
    mesh, dim = space.mesh, space.dim
    x, w = np.polynomial.legendre.leggauss(space.degree + 3)
    values, slopes = lattice.lagrange(lattice.lobatto_points(space.degree + 1), x)
    tables = [[slopes if d == e else values for e in range(dim)] for d in range(dim)]
    value, gradient = lattice.tensor([values] * dim), np.stack([lattice.tensor(table) for table in tables])
    jacobian_table = gradients(mesh.order, dim, x)
    weights = lattice.tensor([w[:, None]] * dim)[:, 0]
    points = mesh.map(x)
    exact_values = jax.jit(jax.vmap(jax.value_and_grad(exact)))
    total = np.zeros(2)
    for cells in np.array_split(np.arange(mesh.num_cells), -(-mesh.num_cells // 1000)):
        u_cells = u[space.element_nodes[cells]]
        jacobian = np.einsum("dqn,cni->cqid", jacobian_table, mesh.points[mesh.cells[cells]])
        # du/dx_i = sum_d (du/dX_d) (dX_d/dx_i)
        du = np.einsum("dqn,cn,cqdi->cqi", gradient, u_cells, np.linalg.inv(jacobian), optimize=True)
        v, dv = exact_values(points[cells].reshape(-1, dim))
        error = u_cells @ value.T - np.asarray(v).reshape(du.shape[:2])
        slope_error = np.sum((du - np.asarray(dv).reshape(du.shape)) ** 2, axis=-1)
        volume = np.linalg.det(jacobian) * weights
        total += np.sum(volume * error**2), np.sum(volume * slope_error)
    return float(np.sqrt(total[0])), float(np.sqrt(total[1]))


# -- the command -----------------------------------------------------------------------------------------------------

_MESH_FILE = Path(__file__).resolve().parent.parent / "examples" / "data" / "pipe_elbow.msh"


def twisted_box() -> Mesh:
    """A square column, twisted and bulging."""

    def warp(x: np.ndarray) -> np.ndarray:
        radius, angle = 1 + 0.25 * np.sin(np.pi * x[:, 2] / 2), 0.4 * np.pi * x[:, 2]
        turned = [np.cos(angle) * x[:, 0] - np.sin(angle) * x[:, 1], np.sin(angle) * x[:, 0] + np.cos(angle) * x[:, 1]]
        return np.stack([radius * turned[0], radius * turned[1], x[:, 2]], axis=1)

    return box(8, 8, 16, lower=(-0.5, -0.5, 0), upper=(0.5, 0.5, 2), order=2, warp=warp)


class ProgressLine:
    """Draws the residual of every iteration; a consumer of taps.

    On a terminal one line is drawn over and over; elsewhere a line is written now and then.
    """

    def __init__(self, label: str, rtol: float, stream: TextIO) -> None:
        self._label, self._rtol, self._stream = label, rtol, stream
        self._live = stream.isatty()
        encoding = getattr(stream, "encoding", None) or "ascii"
        self._full, self._empty = ("\u2588", "\u2591") if encoding.lower().startswith("utf") else ("#", ".")
        self._started = self._drawn = time.perf_counter()
        self._next = np.inf
        self._line = ""

    def __call__(self, k: int, residual: float) -> None:
        now = time.perf_counter()
        if k == 0:
            self._started = now
        self._line = self._text(k, residual, k / max(now - self._started, 1e-9))
        if self._live and (k == 0 or now - self._drawn >= 0.04):
            self._draw(now)
        elif not self._live and (residual < self._next or now - self._drawn >= 10):
            self._draw(now)
            self._next = residual / 100

    def finish(self) -> None:
        """Draws the last state and ends the line."""
        if self._line:
            self._draw(time.perf_counter())
        if self._live:
            print(file=self._stream)

    def _draw(self, now: float) -> None:
        if self._live:
            self._stream.write("\r" + self._line + "\x1b[K")
        else:
            print(self._line, file=self._stream)
            self._line = ""
        self._stream.flush()
        self._drawn = now

    def _text(self, k: int, residual: float, rate: float) -> str:
        done = np.log(residual) / np.log(self._rtol) if 0 < residual < 1 else float(residual == 0)
        filled = round(20 * min(done, 1.0))
        bar = self._full * filled + self._empty * (20 - filled)
        speed = f"{rate:6.0f} it/s" if k else ""
        return (
            f"{self._label:<16} iteration {k:4d}  residual {residual:.2e}  {bar if self._live else ''} {speed}".rstrip()
        )


def _problems(mesh_file: str | None) -> Iterator[tuple[str, Mesh]]:
    if mesh_file is not None:
        yield Path(mesh_file).stem.replace("_", " "), read(mesh_file)
        return
    yield "twisted box", twisted_box()
    if not _MESH_FILE.is_file():
        print("The mesh file of the demo comes with the sources of ceedtap only, it is left out here.")
        return
    try:
        yield _MESH_FILE.stem.replace("_", " "), read(_MESH_FILE)
    except ImportError:
        print("Mesh files need meshio, they are left out: pip install 'ceedtap[mesh]'")


def main(
    mesh: str | None = None,
    degree: int = 3,
    output: str = ".",
    resource: str = "/cpu/self",
    rtol: float = 1e-10,
    max_iterations: int = 2000,
) -> int:
    """Runs the demo and prints what came out; the exit status is 1 when it could not be done."""
    from ceedtap import demo_files

    jax.config.update("jax_enable_x64", True)
    try:
        ceed = Ceed(resource)
        Path(output).mkdir(parents=True, exist_ok=True)
        results = []
        for name, problem in _problems(mesh):
            line = ProgressLine(name, rtol, sys.stdout)
            results.append(
                solve(problem, degree, name=name, ceed=ceed, rtol=rtol, max_iterations=max_iterations, watch=line)
            )
            line.finish()
    except (MeshError, CeedError, OSError, ImportError) as error:
        print(f"ceedtap demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"\n{report(results)}\n")
    library = ceed.library
    print(f"libCEED {library.version}, backend {ceed.get_resource()}: {library.path} (from {library.origin})")
    print(f"JAX {jax.__version__} on {jax.devices()[0].platform}")
    for file, write, needs in (
        ("demo.vtu", lambda path: demo_files.write_vtu(path, results[-1]), "meshio: pip install 'ceedtap[mesh]'"),
        ("demo.png", lambda path: demo_files.draw(path, results), "matplotlib: pip install 'ceedtap[plot]'"),
    ):
        path = Path(output) / file
        try:
            write(path)
        except ImportError:
            print(f"{path} is not written, it needs {needs}")
        except OSError as error:
            print(f"ceedtap demo: {error}", file=sys.stderr)
            return 1
        else:
            print(f"{path} written")
    bad = [result for result in results if not result.converged]
    for result in bad:
        print(
            f"ceedtap demo: {result.name}: not converged, the residual is {result.residuals[-1]:.2e} after "
            f"{result.iterations} iterations (--rtol, --max-iterations)",
            file=sys.stderr,
        )
    return 1 if bad else 0


def report(results: list[Result]) -> str:
    """A table with one column for each problem."""
    rows: list[tuple[str, Callable[[Result], str]]] = [
        ("", lambda r: r.name),
        ("cells", lambda r: f"{r.space.mesh.num_cells}"),
        ("degree", lambda r: f"{r.space.degree}"),
        ("degrees of freedom", lambda r: f"{r.space.lsize}"),
        ("iterations", lambda r: f"{r.iterations}"),
        ("residual / first residual", lambda r: f"{r.residuals[-1]:.2e}"),
        ("error in L2", lambda r: f"{r.l2_error:.3e}"),
        ("  relative", lambda r: f"{r.l2_error / r.l2_norm:.3e}"),
        ("error in H1", lambda r: f"{r.h1_error:.3e}"),
        ("  relative", lambda r: f"{r.h1_error / r.h1_norm:.3e}"),
        ("setup", lambda r: f"{r.seconds['setup']:.2f} s"),
        ("compilation", lambda r: f"{r.seconds['compile']:.2f} s"),
        ("solution", lambda r: f"{r.seconds['solve']:.2f} s"),
    ]
    return "\n".join(f"{title:<26}" + "".join(f"{text(r):>18}" for r in results) for title, text in rows)
