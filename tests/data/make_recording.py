"""Writes recording.ctap with ceedtap, as test data for other versions of Python and JAX.

The committed file was made with Python 3.11 and JAX 0.10.2; its times and run ids are those of that day.

    python tests/data/make_recording.py [FILE]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import ceedtap as ct
from ceedtap import recording_writer

FILE = Path(__file__).parent / "recording.ctap"


def main(path: Path) -> None:
    jax.config.update("jax_enable_x64", True)
    recording_writer.INDEX_FRAMES = 8  # several indices in a small file
    state, energy, keys = ct.Tap("state"), ct.Tap("energy"), ct.Tap("keys")

    def g(x):
        x = ct.id_tap(energy, x * x)
        return x * x

    @jax.jit
    def run(x):
        def body(i, x):
            return ct.id_tap(state, {"step": 10 * i, "u": (x, jnp.bfloat16(i) / 2)}, ordered=True)["u"][0] + 1

        return jax.lax.fori_loop(0, 12, body, x)

    with ct.record(path):
        run(jnp.arange(3.0))
        jax.grad(g)(3.0)
        jax.vmap(g)(jnp.arange(3.0))
        ct.id_tap(keys, jax.random.key(7), label=("a", [1, 2.5]), where=slice(0, 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
