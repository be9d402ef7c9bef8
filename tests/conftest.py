"""Settings of all tests, double precision and four virtual CPU devices; and Ceeds."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from ceed_helpers import BACKENDS

from ceedtap.ceed import Ceed

jax.config.update("jax_enable_x64", True)


@pytest.fixture(params=BACKENDS)
def ceed(request):
    """A new Ceed of every backend in turn."""
    return Ceed(request.param)


@pytest.fixture(scope="module")
def one():
    """One Ceed for a whole file."""
    return Ceed("/cpu/self")
