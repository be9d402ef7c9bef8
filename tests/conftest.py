"""Settings of all tests, double precision and four virtual CPU devices; and Ceeds."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from ceed_helpers import BACKENDS, FASTEST, FOUND

from ceedtap.ceed import Ceed

jax.config.update("jax_enable_x64", True)


def pytest_terminal_summary(terminalreporter):
    """On which backends the tests ran, and what was left out."""
    terminalreporter.write_line(f"\nlibCEED backends: {', '.join(BACKENDS)}; /cpu/self is {FASTEST} ({FOUND.how})")
    for name, fault in FOUND.faults.items():
        if fault:
            terminalreporter.write_line(f"left out: {name} {fault}", yellow=True)


@pytest.fixture(params=BACKENDS)
def ceed(request):
    """A new Ceed of every backend in turn."""
    return Ceed(request.param)


@pytest.fixture(scope="module")
def one():
    """One Ceed for a whole file."""
    return Ceed("/cpu/self")
