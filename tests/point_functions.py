"""Physics at one quadrature point: what the tests of operators and the benchmarks choose from.

Every case is a function of a :class:`Setting` that returns an operator and values for its inputs. The coordinates `x`
of the mesh and, by name, the weights `w` are inputs of nearly all of them. At a point, ``x[d, c]`` is the derivative of
coordinate c in the reference direction d and, for a field of several components, ``u[d, i]`` that of component i.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ceedtap as ct


class Setting:
    """A small warped mesh whose number of elements is no multiple of libCEED's blocks of 8, and spaces on it."""

    def __init__(self, ceed: ct.Ceed, dim: int, degree: int = 1, seed: int = 0) -> None:
        def warp(points: np.ndarray) -> np.ndarray:
            turned = points[:, ::-1]
            return points + 0.06 * np.sin(2 * points + 3 * turned + np.arange(dim))

        self.ceed, self.dim, self.degree = ceed, dim, degree
        self.mesh = ct.mesh.box(*((3, 3, 1) if dim == 3 else (5, 2)), warp=warp)
        self.random = np.random.default_rng(seed)

    def space(self, components: int = 1, degree: int | None = None) -> ct.Space:
        degree = self.degree if degree is None else degree
        return ct.Space(self.ceed, self.mesh, degree, quadrature=self.degree + 1, components=components)

    @cached_property
    def V(self) -> ct.Space:
        """One component."""
        return self.space()

    @cached_property
    def W(self) -> ct.Space:
        """As many components as dimensions."""
        return self.space(self.dim)

    @cached_property
    def X(self) -> ct.Space:
        return self.V.geometry

    def field(self, space: ct.Space, mean: Any = 0.0, amplitude: float = 0.1) -> jax.Array:
        """A smooth field around a mean value."""
        waves = self.random.uniform(1, 3, (space.dim, space.components))
        phases = self.random.uniform(0, 6, space.components)
        values = mean + amplitude * np.sin(space.nodes @ waves + phases)
        return jnp.asarray(values.reshape(space.shape))

    def data(self, *shape: int, mean: Any = 0.0, amplitude: float = 0.1) -> jax.Array:
        """Data at the quadrature points."""
        size = (self.mesh.num_cells, self.V.num_quadrature_points, *shape)
        return jnp.asarray(mean + amplitude * self.random.uniform(-1, 1, size))


@dataclass(frozen=True)
class Case:
    """A point function, where it lives, and values of its inputs.

    Attributes:
        make: gives an operator and a dict of its inputs, without the coordinates, with the parameters as `params`.
        dim, degree: of the setting.
    """

    name: str
    make: Callable[[Setting], tuple[Callable[..., Any], Mapping[str, Any]]]
    dim: int
    degree: int

    def build(self, ceed: ct.Ceed) -> tuple[Any, dict[str, Any]]:
        """The operator, and all its inputs as keyword arguments."""
        setting = Setting(ceed, self.dim, self.degree)
        operator, values = self.make(setting)
        return operator, {**values, "x": jnp.asarray(setting.mesh.points)}


CASES: dict[str, Case] = {}


def case(dim: int, degree: int = 1) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        CASES[make.__name__] = Case(make.__name__, make, dim, degree)
        return make

    return register


# -- geometry and tensors ----------------------------------------------------------------------------------------------


def geometry(x, w):
    """Derivatives of the reference coordinates, ``K[c, d]``, and the weight on the mesh."""
    return jnp.linalg.inv(x), w * jnp.linalg.det(x)


def gradient(K, u):
    """Derivatives by the coordinates: ``[c]`` for one component, ``[i, c]`` for several."""
    return (K @ u).T


def flux(K, dV, P):
    """The factor of the reference derivatives of the test function, from a vector or a tensor ``P[i, c]``."""
    return dV * (K.T @ P.T)


def sym(H):
    return (H + H.T) / 2


def dev(A):
    return A - jnp.trace(A) / len(A) * jnp.eye(len(A))


def from_energy(psi):
    """A hyperelastic point function: the derivative of an energy density of the deformation gradient."""

    def residual(u, x, w, params):
        K, dV = geometry(x, w)
        F = jnp.eye(len(x)) + gradient(K, u)
        return flux(K, dV, jax.grad(psi)(F, params))

    return residual


def hyperelastic(s: Setting, psi, params):
    W, X = s.W, s.X
    make = ct.operator(
        inputs={"u": W.grad, "x": X.grad, "w": X.weight}, outputs={"v": W.grad}, params=params, name=psi.__name__
    )
    return make(from_energy(psi)), {"u": s.field(W), "params": params}


# -- scalar equations --------------------------------------------------------------------------------------------------


@case(dim=3, degree=2)
def mass(s):
    @ct.operator(inputs={"u": s.V.value, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.value})
    def mass(u, x, w):
        return w * jnp.linalg.det(x) * u

    return mass, {"u": s.field(s.V)}


@case(dim=3, degree=2)
def diffusion(s):
    @ct.operator(inputs={"u": s.V.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.grad})
    def diffusion(u, x, w):
        K, dV = geometry(x, w)
        return flux(K, dV, gradient(K, u))

    return diffusion, {"u": s.field(s.V)}


@case(dim=2, degree=2)
def anisotropic_diffusion(s):
    @ct.operator(
        inputs={"u": s.V.grad, "k": ct.quadrature(2, 2), "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.grad}
    )
    def anisotropic_diffusion(u, k, x, w):
        K, dV = geometry(x, w)
        return flux(K, dV, k @ gradient(K, u))

    return anisotropic_diffusion, {"u": s.field(s.V), "k": s.data(2, 2, mean=np.array([[2.0, 0.3], [0.1, 1.0]]))}


@case(dim=2, degree=2)
def advection(s):
    @ct.operator(inputs={"u": s.V.grad, "b": s.W.value, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.value})
    def advection(u, b, x, w):
        K, dV = geometry(x, w)
        return dV * b @ gradient(K, u)

    return advection, {"u": s.field(s.V), "b": s.field(s.W, 1.0, 0.5)}


@case(dim=2)
def supg(s):
    """Advection and diffusion, with streamline upwinding after Shakib's metric."""
    params = {"k": 0.01, "source": 1.0}

    @ct.operator(
        inputs={"u": (s.V.value, s.V.grad), "b": s.W.value, "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (s.V.value, s.V.grad)},
        params=params,
    )
    def supg(u, b, x, w, params):
        value, slope = u
        K, dV = geometry(x, w)
        g = gradient(K, slope)
        metric = K @ K.T
        tau = 1 / jnp.sqrt(4 * b @ metric @ b + 9 * params["k"] ** 2 * jnp.sum(metric**2))
        strong = b @ g + value - params["source"]
        return dV * strong, flux(K, dV, params["k"] * g + tau * strong * b)

    return supg, {"u": s.field(s.V), "b": s.field(s.W, 1.0, 0.5), "params": params}


@case(dim=2, degree=2)
def p_laplacian(s):
    params = {"p": 3.5, "eps": 1e-2}

    @ct.operator(inputs={"u": s.V.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.grad}, params=params)
    def p_laplacian(u, x, w, params):
        K, dV = geometry(x, w)
        g = gradient(K, u)
        return flux(K, dV, (params["eps"] + g @ g) ** (params["p"] / 2 - 1) * g)

    return p_laplacian, {"u": s.field(s.V), "params": params}


@case(dim=2, degree=2)
def minimal_surface(s):
    @ct.operator(inputs={"u": s.V.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.grad})
    def minimal_surface(u, x, w):
        K, dV = geometry(x, w)
        return flux(K, dV, jax.grad(lambda g: jnp.sqrt(1 + g @ g))(gradient(K, u)))

    return minimal_surface, {"u": s.field(s.V, amplitude=1.0)}


@case(dim=3)
def heat(s):
    """Conductivity and capacity depend on the temperature."""
    params = {"k": jnp.array([1.0, 0.4, -0.02]), "c": 2.0, "dt": 0.1}

    @ct.operator(
        inputs={"T": (s.V.value, s.V.grad), "old": s.V.value, "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (s.V.value, s.V.grad)},
        params=params,
    )
    def heat(T, old, x, w, params):
        value, slope = T
        K, dV = geometry(x, w)
        conductivity = jnp.polyval(params["k"][::-1], value)
        capacity = params["c"] * (1 + 0.1 * jnp.tanh(value))
        return dV * capacity * (value - old) / params["dt"], flux(K, dV, conductivity * gradient(K, slope))

    return heat, {"T": s.field(s.V, 2.0, 0.5), "old": s.field(s.V, 2.0, 0.5), "params": params}


@case(dim=2)
def radiation(s):
    params = {"emissivity": 0.8, "ambient": 0.5}

    @ct.operator(inputs={"T": s.V.value, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.V.value}, params=params)
    def radiation(T, x, w, params):
        return w * jnp.linalg.det(x) * params["emissivity"] * (T**4 - params["ambient"] ** 4)

    return radiation, {"T": s.field(s.V, 1.0), "params": params}


@case(dim=2)
def michaelis_menten(s):
    params = {"rate": 2.0, "half": 0.3}

    @ct.operator(
        inputs={"c": s.V.value, "enzyme": s.V.value, "x": s.X.grad, "w": s.X.weight},
        outputs={"v": s.V.value},
        params=params,
    )
    def michaelis_menten(c, enzyme, x, w, params):
        return w * jnp.linalg.det(x) * params["rate"] * enzyme * c / (params["half"] + c)

    return michaelis_menten, {"c": s.field(s.V, 0.5), "enzyme": s.field(s.V, 1.0), "params": params}


@case(dim=2)
def gray_scott(s):
    params = {"feed": 0.04, "kill": 0.06, "d": jnp.array([2e-2, 1e-2])}
    U = s.space(2)

    @ct.operator(
        inputs={"u": (U.value, U.grad), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (U.value, U.grad)},
        params=params,
    )
    def gray_scott(u, x, w, params):
        (a, b), slope = u
        K, dV = geometry(x, w)
        turnover = a * b**2
        rate = jnp.stack([turnover - params["feed"] * (1 - a), (params["feed"] + params["kill"]) * b - turnover])
        return dV * rate, flux(K, dV, params["d"][:, None] * gradient(K, slope))

    return gray_scott, {"u": s.field(U, np.array([0.7, 0.3])), "params": params}


@case(dim=2, degree=2)
def cahn_hilliard(s):
    """The mixed form: concentration and chemical potential."""
    params = {"epsilon": 0.05, "mobility": 0.3, "dt": 0.1}

    @ct.operator(
        inputs={
            "c": (s.V.value, s.V.grad), "mu": (s.V.value, s.V.grad), "old": s.V.value,
            "x": s.X.grad, "w": s.X.weight,
        },
        outputs={"q": (s.V.value, s.V.grad), "v": (s.V.value, s.V.grad)},
        params=params,
    )  # fmt: skip
    def cahn_hilliard(c, mu, old, x, w, params):
        K, dV = geometry(x, w)
        well = jax.grad(lambda c: (c**2 - 1) ** 2 / 4)
        mobility = params["mobility"] * (1 - c[0] ** 2) ** 2
        return {
            "v": (dV * (mu[0] - well(c[0])), flux(K, -dV, params["epsilon"] ** 2 * gradient(K, c[1]))),
            "q": (dV * (c[0] - old) / params["dt"], flux(K, dV, mobility * gradient(K, mu[1]))),
        }

    c = s.field(s.V, amplitude=0.6)
    return cahn_hilliard, {"c": c, "mu": s.field(s.V), "old": 0.9 * c, "params": params}


@case(dim=3)
def poisson_boltzmann(s):
    params = {"kappa2": 1.3}

    @ct.operator(
        inputs={"phi": (s.V.value, s.V.grad), "rho": ct.quadrature(), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (s.V.value, s.V.grad)},
        params=params,
    )
    def poisson_boltzmann(phi, rho, x, w, params):
        K, dV = geometry(x, w)
        return dV * (params["kappa2"] * jnp.sinh(phi[0]) - rho), flux(K, dV, gradient(K, phi[1]))

    return poisson_boltzmann, {"phi": s.field(s.V, amplitude=0.8), "rho": s.data(), "params": params}


@case(dim=2)
def richards(s):
    """Unsaturated flow after van Genuchten and Mualem, with gravity."""
    params = {"alpha": 1.5, "n": 2.2, "k": 0.7}

    @ct.operator(
        inputs={"h": (s.V.value, s.V.grad), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (s.V.value, s.V.grad)},
        params=params,
    )
    def richards(h, x, w, params):
        n, suction = params["n"], jnp.maximum(-params["alpha"] * h[0], 0.0)
        m = 1 - 1 / n
        saturation = jnp.where(h[0] < 0, (1 + suction**n) ** -m, 1.0)
        relative = jnp.sqrt(saturation) * (1 - (1 - saturation ** (1 / m)) ** m) ** 2
        K, dV = geometry(x, w)
        return dV * saturation, flux(K, dV, params["k"] * relative * (gradient(K, h[1]) + jnp.array([0.0, 1.0])))

    return richards, {"h": s.field(s.V, -0.6, 0.4), "params": params}


# -- solids ------------------------------------------------------------------------------------------------------------

LAME = {"mu": 1.0, "lam": 1.5}


@case(dim=3)
def linear_elasticity(s):
    @ct.operator(inputs={"u": s.W.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.W.grad}, params=LAME)
    def linear_elasticity(u, x, w, params):
        K, dV = geometry(x, w)
        strain = sym(gradient(K, u))
        return flux(K, dV, 2 * params["mu"] * strain + params["lam"] * jnp.trace(strain) * jnp.eye(3))

    return linear_elasticity, {"u": s.field(s.W), "params": LAME}


@case(dim=3)
def st_venant_kirchhoff(s):
    def st_venant_kirchhoff(F, m):
        E = (F.T @ F - jnp.eye(3)) / 2
        return m["lam"] / 2 * jnp.trace(E) ** 2 + m["mu"] * jnp.sum(E * E)

    return hyperelastic(s, st_venant_kirchhoff, LAME)


def neo_hookean_energy(F, m):
    J = jnp.linalg.det(F)
    return m["mu"] / 2 * (jnp.sum(F * F) - 3) - m["mu"] * jnp.log(J) + m["lam"] / 2 * jnp.log(J) ** 2


@case(dim=3)
def neo_hookean(s):
    return hyperelastic(s, neo_hookean_energy, LAME)


@case(dim=3)
def mooney_rivlin(s):
    def mooney_rivlin(F, m):
        C, J = F.T @ F, jnp.linalg.det(F)
        I1, I2 = jnp.trace(C), (jnp.trace(C) ** 2 - jnp.sum(C * C)) / 2
        return m["c1"] * (I1 * J ** (-2 / 3) - 3) + m["c2"] * (I2 * J ** (-4 / 3) - 3) + m["k"] / 2 * (J - 1) ** 2

    return hyperelastic(s, mooney_rivlin, {"c1": 0.4, "c2": 0.2, "k": 3.0})


@case(dim=3)
def ogden(s):
    """In principal stretches, which are different at all points here."""

    def ogden(F, m):
        J = jnp.linalg.det(F)
        stretches = jnp.sqrt(jnp.linalg.eigh(F.T @ F)[0])
        terms = m["mu"] / m["alpha"] * (jnp.sum((J ** (-1 / 3) * stretches)[:, None] ** m["alpha"], axis=0) - 3)
        return jnp.sum(terms) + m["k"] / 2 * (J - 1) ** 2

    operator, values = hyperelastic(s, ogden, {"mu": jnp.array([0.6, -0.1]), "alpha": jnp.array([1.3, -2.0]), "k": 3.0})
    return operator, {**values, "u": values["u"] + jnp.asarray(s.X.nodes) * jnp.array([0.3, 0.0, -0.2])}


@case(dim=3)
def holzapfel(s):
    """Fibres that carry load under tension only."""
    params = {"mu": 1.0, "k": 10.0, "k1": 0.5, "k2": 1.2}

    def psi(F, a, m):
        J = jnp.linalg.det(F)
        fibre = F @ a
        stretch = jnp.maximum(fibre @ fibre - 1, 0.0)
        ground = m["mu"] / 2 * (J ** (-2 / 3) * jnp.sum(F * F) - 3) + m["k"] / 2 * jnp.log(J) ** 2
        return ground + m["k1"] / (2 * m["k2"]) * jnp.expm1(m["k2"] * stretch**2)

    @ct.operator(
        inputs={"u": s.W.grad, "a": ct.quadrature(3), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": s.W.grad},
        params=params,
    )
    def holzapfel(u, a, x, w, params):
        K, dV = geometry(x, w)
        a = a / jnp.linalg.norm(a)
        return flux(K, dV, jax.grad(psi)(jnp.eye(3) + gradient(K, u), a, params))

    fibres = s.data(3, mean=np.array([1.0, 0.5, 0.0]), amplitude=0.3)
    return holzapfel, {"u": s.field(s.W), "a": fibres, "params": params}


@case(dim=3)
def energy(s):
    """The energy at the points; its gradient is the internal force."""

    @ct.operator(inputs={"u": s.W.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"e": ct.quadrature()}, params=LAME)
    def energy(u, x, w, params):
        K, dV = geometry(x, w)
        return dV * neo_hookean_energy(jnp.eye(3) + gradient(K, u), params)

    return energy, {"u": s.field(s.W), "params": LAME}


@case(dim=3)
def j2_plasticity(s):
    """Small strains, Swift's hardening; the plastic multiplier is the root of a scalar equation."""
    params = {"mu": 80.0, "bulk": 160.0, "yield": 0.4, "exponent": 0.3, "scale": 50.0}

    @ct.operator(
        inputs={
            "u": s.W.grad, "plastic": ct.quadrature(3, 3), "hardening": ct.quadrature(), "x": s.X.grad, "w": s.X.weight
        },
        outputs={"v": s.W.grad, "new_plastic": ct.quadrature(3, 3), "new_hardening": ct.quadrature()},
        params=params,
    )  # fmt: skip
    def j2_plasticity(u, plastic, hardening, x, w, params):
        K, dV = geometry(x, w)
        strain = sym(gradient(K, u))
        trial = 2 * params["mu"] * dev(strain - sym(plastic))
        norm = jnp.sqrt(1.5 * jnp.sum(trial**2) + 1e-12)

        def strength(alpha):
            return params["yield"] * (1 + params["scale"] * alpha) ** params["exponent"]

        yields = norm > strength(hardening)

        def excess(step):
            return norm - 3 * params["mu"] * step - strength(hardening + step)

        def newton(f, start):
            def improve(state):
                step, _, count = state
                value, slope = jax.value_and_grad(f)(step)
                return step - value / slope, value, count + 1

            def goes_on(state):
                return (jnp.abs(state[1]) > 1e-13 * norm) & (state[2] < 30)

            return lax.while_loop(goes_on, improve, (start, norm, 0))[0]

        root = lax.custom_root(excess, jnp.zeros(()), newton, lambda g, y: y / g(jnp.ones(())))
        step = jnp.where(yields, root, 0.0)
        direction = 1.5 * trial / norm
        stress = trial - 2 * params["mu"] * step * direction + params["bulk"] * jnp.trace(strain) * jnp.eye(3)
        return flux(K, dV, stress), sym(plastic) + step * direction, hardening + step

    values = {
        "u": s.field(s.W, amplitude=0.01),
        "plastic": s.data(3, 3, amplitude=1e-3),
        "hardening": s.data(mean=0.01, amplitude=0.01),
    }
    return j2_plasticity, {**values, "params": params}


@case(dim=3)
def drucker_prager(s):
    """Return to the cone or to its apex; elastic points take a branch of their own."""
    params = {"mu": 80.0, "bulk": 160.0, "cohesion": 0.3, "friction": 0.3}

    @ct.operator(inputs={"u": s.W.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.W.grad}, params=params)
    def drucker_prager(u, x, w, params):
        K, dV = geometry(x, w)
        strain = sym(gradient(K, u))
        deviator = 2 * params["mu"] * dev(strain)
        pressure = params["bulk"] * jnp.trace(strain)
        norm = jnp.sqrt(jnp.sum(deviator**2) / 2 + 1e-12)
        excess = norm + params["friction"] * pressure - params["cohesion"]

        def elastic(_):
            return deviator, pressure

        def plastic(excess):
            step = excess / (params["mu"] + params["friction"] ** 2 * params["bulk"])

            def cone(step):
                scale = 1 - params["mu"] * step / norm
                return scale * deviator, pressure - params["friction"] * params["bulk"] * step

            def apex(_):
                return jnp.zeros((3, 3)), params["cohesion"] / params["friction"]

            return lax.cond(params["mu"] * step < norm, cone, apex, step)

        deviator, pressure = lax.cond(excess > 0, plastic, elastic, excess)
        return flux(K, dV, deviator + pressure * jnp.eye(3))

    return drucker_prager, {"u": s.field(s.W, amplitude=0.01), "params": params}


@case(dim=3)
def viscoelasticity(s):
    """Two Maxwell elements, whose strains are kept at the points and go one implicit step on."""
    params = {"mu": 1.0, "lam": 1.5, "moduli": jnp.array([0.5, 0.25]), "times": jnp.array([0.1, 1.0]), "dt": 0.05}

    @ct.operator(
        inputs={"u": s.W.grad, "viscous": ct.quadrature(2, 3, 3), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": s.W.grad, "new": ct.quadrature(2, 3, 3)},
        params=params,
    )
    def viscoelasticity(u, viscous, x, w, params):
        K, dV = geometry(x, w)
        strain = sym(gradient(K, u))
        ratio = (params["dt"] / params["times"])[:, None, None]
        new = (viscous + ratio * dev(strain)) / (1 + ratio)
        overstress = jnp.einsum("m,mij->ij", 2 * params["moduli"], dev(strain) - new)
        stress = 2 * params["mu"] * strain + params["lam"] * jnp.trace(strain) * jnp.eye(3) + overstress
        return flux(K, dV, stress), new

    return viscoelasticity, {"u": s.field(s.W), "viscous": s.data(2, 3, 3), "params": params}


@case(dim=2)
def thermoelasticity(s):
    params = {**LAME, "expansion": 0.1, "k": 0.5}

    @ct.operator(
        inputs={"u": s.W.grad, "T": (s.V.value, s.V.grad), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": s.W.grad, "q": s.V.grad},
        params=params,
    )
    def thermoelasticity(u, T, x, w, params):
        K, dV = geometry(x, w)
        strain = sym(gradient(K, u)) - params["expansion"] * T[0] * jnp.eye(2)
        stress = 2 * params["mu"] * strain + params["lam"] * jnp.trace(strain) * jnp.eye(2)
        conductivity = params["k"] * jnp.exp(-jnp.trace(strain))
        return flux(K, dV, stress), flux(K, dV, conductivity * gradient(K, T[1]))

    return thermoelasticity, {"u": s.field(s.W), "T": s.field(s.V), "params": params}


@case(dim=2)
def phase_field_fracture(s):
    """AT2 with Amor's split: only tension and shear are degraded."""
    params = {"mu": 1.0, "bulk": 2.0, "g": 0.1, "length": 0.2}

    def psi(H, d, slope, m):
        strain = sym(H)
        tr = jnp.trace(strain)
        damaged = m["bulk"] / 2 * jnp.maximum(tr, 0.0) ** 2 + m["mu"] * jnp.sum(dev(strain) ** 2)
        kept = m["bulk"] / 2 * jnp.minimum(tr, 0.0) ** 2
        crack = m["g"] / 2 * (d**2 / m["length"] + m["length"] * slope @ slope)
        return (1 - d) ** 2 * damaged + kept + crack

    @ct.operator(
        inputs={"u": s.W.grad, "d": (s.V.value, s.V.grad), "x": s.X.grad, "w": s.X.weight},
        outputs={"v": s.W.grad, "q": (s.V.value, s.V.grad)},
        params=params,
    )
    def phase_field_fracture(u, d, x, w, params):
        K, dV = geometry(x, w)
        stress, source, current = jax.grad(psi, (0, 1, 2))(gradient(K, u), d[0], gradient(K, d[1]), params)
        return flux(K, dV, stress), (dV * source, flux(K, dV, current))

    return phase_field_fracture, {"u": s.field(s.W, amplitude=0.3), "d": s.field(s.V, 0.3), "params": params}


def perceptron(sizes, seed=0):
    """Weights of a multilayer perceptron."""
    random = np.random.default_rng(seed)
    return [
        {
            "W": jnp.asarray(random.standard_normal((n, m)) / np.sqrt(m)),
            "b": jnp.asarray(0.1 * random.standard_normal(n)),
        }
        for m, n in itertools.pairwise(sizes)
    ]


def evaluate_perceptron(layers, z):
    for layer in layers[:-1]:
        z = jnp.tanh(layer["W"] @ z + layer["b"])
    return layers[-1]["W"] @ z + layers[-1]["b"]


def learned_law(s, hidden):
    """A plane constitutive law: a network gives the Cholesky factor of the secant stiffness, so that is positive."""
    params = perceptron([3, hidden, hidden, 6])

    @ct.operator(inputs={"u": s.W.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.W.grad}, params=params)
    def learned_law(u, x, w, params):
        K, dV = geometry(x, w)
        H = gradient(K, u)
        strain = jnp.stack([H[0, 0], H[1, 1], H[0, 1] + H[1, 0]])
        entries = evaluate_perceptron(params, strain)
        L = jnp.zeros((3, 3)).at[jnp.tril_indices(3)].set(entries)
        stress = L @ (L.T @ strain)
        return flux(K, dV, jnp.array([[stress[0], stress[2]], [stress[2], stress[1]]]))

    return learned_law, {"u": s.field(s.W), "params": params}


@case(dim=2)
def learned_law_8(s):
    return learned_law(s, 8)


# -- fluids and fields -------------------------------------------------------------------------------------------------


@case(dim=2, degree=2)
def navier_stokes(s):
    """Momentum and mass of an implicit step; the pressure is of a lower degree (Taylor and Hood's element)."""
    params = {"viscosity": 0.01, "dt": 0.1, "force": jnp.array([0.0, -1.0])}
    P = s.space(degree=1)

    @ct.operator(
        inputs={
            "u": (s.W.value, s.W.grad), "p": P.value, "old": s.W.value, "x": s.X.grad, "w": s.X.weight,
        },
        outputs={"v": (s.W.value, s.W.grad), "q": P.value},
        params=params,
    )  # fmt: skip
    def navier_stokes(u, p, old, x, w, params):
        velocity, slope = u
        K, dV = geometry(x, w)
        H = gradient(K, slope)
        inertia = (velocity - old) / params["dt"] + H @ velocity - params["force"]
        stress = 2 * params["viscosity"] * sym(H) - p * jnp.eye(2)
        return (dV * inertia, flux(K, dV, stress)), dV * jnp.trace(H)

    values = {"u": s.field(s.W, amplitude=1.0), "old": s.field(s.W, amplitude=1.0), "p": s.field(P)}
    return navier_stokes, {**values, "params": params}


@case(dim=2)
def shallow_water(s):
    params = {"gravity": 9.81, "friction": 0.03}
    U = s.space(3)

    @ct.operator(
        inputs={"U": U.value, "bottom": s.V.grad, "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (U.value, U.grad)},
        params=params,
    )
    def shallow_water(U, bottom, x, w, params):
        K, dV = geometry(x, w)
        h, q = U[0], U[1:]
        velocity = q / h
        momentum = jnp.outer(q, velocity) + params["gravity"] * h**2 / 2 * jnp.eye(2)
        slope = params["gravity"] * h * gradient(K, bottom)
        drag = params["gravity"] * params["friction"] ** 2 * jnp.sqrt(q @ q + 1e-6) * q / h ** (7 / 3)
        source = jnp.concatenate([jnp.zeros(1), slope + drag])
        return dV * source, flux(K, -dV, jnp.concatenate([q[None], momentum]))

    return shallow_water, {"U": s.field(U, np.array([1.0, 0.3, 0.2])), "bottom": s.field(s.V), "params": params}


@case(dim=3)
def euler(s):
    """The flux of the compressible equations in conserved variables."""
    params = {"gamma": 1.4}
    U = s.space(5)

    @ct.operator(inputs={"U": U.value, "x": s.X.grad, "w": s.X.weight}, outputs={"v": U.grad}, params=params)
    def euler(U, x, w, params):
        K, dV = geometry(x, w)
        density, momentum, total = U[0], U[1:4], U[4]
        velocity = momentum / density
        pressure = (params["gamma"] - 1) * (total - momentum @ velocity / 2)
        tensor = jnp.outer(momentum, velocity) + pressure * jnp.eye(3)
        return flux(K, -dV, jnp.vstack([momentum, tensor, (total + pressure) * velocity]))

    return euler, {"U": s.field(U, np.array([1.0, 0.3, 0.2, -0.1, 2.5])), "params": params}


@case(dim=2, degree=2)
def bingham(s):
    """A yield stress, regularised by Papanastasiou's exponential."""
    params = {"viscosity": 0.1, "yield": 0.5, "exponent": 5.0}

    @ct.operator(inputs={"u": s.W.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.W.grad}, params=params)
    def bingham(u, x, w, params):
        K, dV = geometry(x, w)
        D = sym(gradient(K, u))
        rate = jnp.sqrt(2 * jnp.sum(D * D) + 1e-8)
        apparent = params["viscosity"] - params["yield"] * jnp.expm1(-params["exponent"] * rate) / rate
        return flux(K, dV, 2 * apparent * D)

    return bingham, {"u": s.field(s.W, amplitude=0.5), "params": params}


@case(dim=3)
def maxwell_stress(s):
    """The force of an electrostatic field on a dielectric, for the test functions of a displacement."""
    params = {"permittivity": 1.2}

    @ct.operator(inputs={"phi": s.V.grad, "x": s.X.grad, "w": s.X.weight}, outputs={"v": s.W.grad}, params=params)
    def maxwell_stress(phi, x, w, params):
        K, dV = geometry(x, w)
        E = -gradient(K, phi)
        return flux(K, dV, params["permittivity"] * (jnp.outer(E, E) - E @ E / 2 * jnp.eye(3)))

    return maxwell_stress, {"phi": s.field(s.V, amplitude=1.0), "params": params}


@case(dim=3)
def landau_lifshitz_gilbert(s):
    params = {"damping": 0.1, "exchange": 0.3, "field": jnp.array([0.0, 0.2, 1.0])}

    @ct.operator(
        inputs={"m": (s.W.value, s.W.grad), "rate": s.W.value, "x": s.X.grad, "w": s.X.weight},
        outputs={"v": (s.W.value, s.W.grad)},
        params=params,
    )
    def landau_lifshitz_gilbert(m, rate, x, w, params):
        K, dV = geometry(x, w)
        value, H = m[0], gradient(K, m[1])
        torque = jax.vmap(jnp.cross, (None, 1), 1)(value, H)
        local = rate - params["damping"] * jnp.cross(value, rate) + jnp.cross(value, params["field"])
        return dV * local, flux(K, dV, params["exchange"] * torque)

    values = {"m": s.field(s.W, np.array([0.2, 0.1, 0.9])), "rate": s.field(s.W)}
    return landau_lifshitz_gilbert, {**values, "params": params}
