"""The native queue, registry and lock under the sanitizers: a stress program in C, see tests/native."""

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "native" / "run.sh"


def has_sanitizers(tmp_path):
    if shutil.which("gcc") is None:
        return False
    source = tmp_path / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    return all(
        subprocess.run(
            ["gcc", f"-fsanitize={name}", str(source), "-o", str(tmp_path / "empty")], capture_output=True, check=False
        ).returncode
        == 0
        for name in ("address,undefined", "thread")
    )


def test_stress_is_clean_and_accounts_for_every_event(tmp_path):
    if not has_sanitizers(tmp_path):
        pytest.skip("gcc with the runtimes of its sanitizers is needed")
    done = subprocess.run([str(RUN), "40000"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("policy") == 10
