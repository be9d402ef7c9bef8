"""The code in docs/recording.md runs, and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "recording.md").read_text(encoding="utf-8")


def blocks(*kinds):
    return [body for kind, body in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL) if kind in kinds]


def test_the_code_runs_and_prints_what_the_page_says(tmp_path):
    for package in ("xarray", "zarr", "pyarrow"):
        pytest.importorskip(package)
    code, said = "\n".join(blocks("python")), "".join(blocks("text"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == said


def test_the_format_on_the_page_is_the_one_that_is_written():
    from ceedtap import recording_format as fmt

    ids = dict(re.findall(r"\| `(ctap-\w+)` \| (\w+) \|", PAGE))
    assert {name: getattr(fmt, constant.upper()) for name, constant in ids.items()} == {
        name: int.from_bytes(name.encode(), "big") for name in ids
    }
    assert {getattr(fmt, constant.upper()) for constant in ids.values()} | {0} == fmt.RESERVED
