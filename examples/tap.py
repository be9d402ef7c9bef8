"""Watch Newton's method from outside of the compiled program that it runs in."""

import jax

import ceedtap as ct


def show(k, x, residual):
    print(f"iteration {k}: x = {x:.6f}, residual {residual:.1e}")


@jax.jit
def square_root(a):
    def step(k, x):
        k, x, _ = ct.id_tap(show, k, x, abs(x * x - a))
        return (x + a / x) / 2

    return jax.lax.fori_loop(0, 4, step, a)


with ct.outfeed_receiver():
    square_root(2.0)
