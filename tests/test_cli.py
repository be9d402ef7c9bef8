"""The command line as a user calls it: exit statuses, one clear line for each mistake, no tracebacks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ceedtap
from ceedtap import cli, install

DATA = Path(__file__).parent.parent / "examples" / "data"
PLATE = str(DATA / "plate_with_hole.msh")
TETRAHEDRON = """\
$MeshFormat
2.2 0 8
$EndMeshFormat
$Nodes
4
1 0 0 0
2 1 0 0
3 0 1 0
4 0 0 1
$EndNodes
$Elements
1
1 4 2 1 1 1 2 3 4
$EndElements
"""


def ceedtap_command(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "ceedtap", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version():
    done = ceedtap_command("--version")
    assert done.returncode == 0
    assert done.stdout == f"ceedtap {ceedtap.__version__}\n"


@pytest.mark.parametrize(
    "args", [[], ["nonsense"], ["demo", "--degree", "0"], ["demo", "--degree", "two"], ["demo", "--rtol", "2"]]
)
def test_wrong_usage(args, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert "usage: ceedtap" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["demo", "doctor", "install-libceed", "cache", "follow", "replay", "info", "export"]
)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: ceedtap {command}" in capsys.readouterr().out


def test_demo_on_a_mesh_file(tmp_path):
    done = ceedtap_command("demo", "--mesh", PLATE, "--degree", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "plate with hole" in done.stdout
    assert "error in L2" in done.stdout
    assert (tmp_path / "demo.vtu").is_file()
    assert (tmp_path / "demo.png").is_file()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("missing.msh", None, "missing.msh"),
        ("prose.msh", "This is no mesh.\n", "prose.msh"),
        ("prose.xyzzy", "This is no mesh.\n", "prose.xyzzy"),
        ("tetrahedra.msh", TETRAHEDRON, "tetra"),
    ],
)
def test_demo_on_what_is_no_mesh_for_it(name, text, expected, tmp_path):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    done = ceedtap_command("demo", "--mesh", str(path), "--output", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("ceedtap demo: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("resource", ["/nonsense", "/gpu/cuda"])
def test_demo_on_a_backend_that_does_not_work(resource, tmp_path):
    done = ceedtap_command("demo", "--ceed", resource, "--output", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("ceedtap demo: ")
    assert done.stderr.count("\n") == 1


def test_demo_without_libceed(tmp_path):
    done = ceedtap_command("demo", "--output", str(tmp_path), CEEDTAP_LIBCEED=str(tmp_path / "libceed.so"))
    assert done.returncode == 1
    assert "CEEDTAP_LIBCEED" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_into_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    done = ceedtap_command("demo", "--mesh", PLATE, "--output", str(tmp_path / "file"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def test_interrupt(tmp_path):
    """Ctrl-C ends the command with status 130 and without a traceback."""
    with subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "ceedtap",
            "demo",
            "--degree",
            "5",
            "--rtol",
            "1e-200",
            "--max-iterations",
            "100000",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        for _ in range(2):  # the program runs
            assert "iteration" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        _, err = process.communicate(timeout=120)
    assert time.monotonic() - sent < 10  # although the program goes on for longer
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_interrupt_of_any_command(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_doctor", interrupt)
    assert cli.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_libceed_is_not_downloaded_where_it_is_found(capsys):
    assert cli.main(["install-libceed"]) == 0
    assert "is there already" in capsys.readouterr().out


def test_libceed_that_cannot_be_installed_is_one_message(monkeypatch, capsys):
    def fail(**kwargs):
        raise install.InstallError("no network")

    monkeypatch.setattr(install, "install_libceed", fail)
    assert cli.main(["install-libceed", "--force"]) == 1
    assert capsys.readouterr().err == "ceedtap install-libceed: no network\n"


def test_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["cache", "info"]) == 0
    for name in ("objects/a.so", "libceed/0.12.0/lib/libceed.so"):
        path = tmp_path / "ceedtap" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1_500_000))
    assert cli.main(["cache", "info"]) == 0
    assert "1 file, 1.5 MB" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert [path.name for path in (tmp_path / "ceedtap").iterdir()] == ["libceed"]
    assert cli.main(["cache", "clear", "--all"]) == 0
    assert list((tmp_path / "ceedtap").iterdir()) == []
