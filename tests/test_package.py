"""The package as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest

import ceedtap as ct


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", sorted(ct._HOME))
def test_public_names(name):
    assert getattr(ct, name) is getattr(ct, name)
    assert name in dir(ct)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ct.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_heavy():
    done = run_python("import sys, ceedtap; print({'jax', 'cffi', 'numpy'} & set(sys.modules))")
    assert done.stdout.strip() == "set()"


def test_private_jax_is_in_one_file_only():
    package = Path(ct.__file__).parent
    users = [path.name for path in package.rglob("*.py") if "jax._src" in path.read_text(encoding="utf-8")]
    assert users == ["jax_compat.py"]
