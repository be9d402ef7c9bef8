"""``ceedtap info | replay | export`` as a user calls them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap import cli


@pytest.fixture
def path(tmp_path):
    """Three steps of `flux` with their cotangents, and one event of `other`."""
    flux, other = ct.Tap("flux"), ct.Tap("other")
    with ct.record(tmp_path / "run.ctap"):
        for i in range(3):
            jax.grad(lambda x: jnp.sum(ct.id_tap(flux, {"u": x, "step": 10 * 1})["u"] ** 2))(jnp.full(2, float(i)))
        ct.id_tap(other, jnp.arange(3), what="label")
    return tmp_path / "run.ctap"


def run(*args):
    return cli.main([str(arg) for arg in args])


def test_info(path, capsys):
    assert run("info", path) == 0
    head, primal, cotangent, label, state = capsys.readouterr().out.splitlines()
    assert head.split() == ["tap", "events", "arrays", "MB", "steps", "devices", "from", "seconds"]
    assert primal.split()[:6] == ["flux", "3", "int64[],", "float64[2]", "0.00", "10..10"]
    assert cotangent.startswith("flux (jvp, transpose)  3 ")
    assert label.split()[:5] == ["label", "1", "int64[3]", "0.00", "0..0"]
    assert state == f"{path}: 7 events, 0.00 MB, ended"


def test_info_of_a_damaged_recording(path, capsys):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:2000])
    assert run("info", path) == 1
    out = capsys.readouterr().out
    assert "not ended: its process was killed, or is still recording" in out
    with ct.open(path) as recording:
        assert f"damaged from byte {recording.damage.offset} on: the file ends within a " in out


@pytest.mark.parametrize("command", [["info"], ["replay"], ["export"]], ids=lambda c: c[0])
def test_files_that_are_no_recordings(command, tmp_path, capsys):
    (tmp_path / "x").write_bytes(b"nothing of the kind")
    output = [tmp_path / "out.npz"] if command == ["export"] else []
    for name, text in (("x", "no recording of ceedtap"), ("missing", "No such file")):
        assert run(*command, tmp_path / name, *output) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"ceedtap {command[0]}: ")
        assert text in err
        assert err.count("\n") == 1


def test_replay(path, capsys):
    assert run("replay", path, "--tap", "label") == 0
    assert capsys.readouterr().out == "what: label\n[0 1 2]\n"
    assert run("replay", path, "--speed", "1000") == 0
    out = capsys.readouterr().out
    assert out.count("what: flux\n") == 3
    assert out.count("what: flux transforms: (('jvp', {}), ('transpose', {}))\n") == 3
    assert run("replay", path, "--tap", "nothing") == 1
    assert capsys.readouterr().err == f"ceedtap replay: {path} has no tap 'nothing'; its taps: 'flux', 'label'\n"
    with pytest.raises(SystemExit):
        run("replay", path, "--speed", "0")


def test_export(path, tmp_path, capsys):
    out = tmp_path / "out.npz"
    assert run("export", path, out) == 1
    assert capsys.readouterr().err == "ceedtap export: choose one of the taps with --tap: flux, label\n"
    assert run("export", path, "--tap", "flux", out) == 0
    assert capsys.readouterr().out == f"3 events of flux in {out}\n"
    with np.load(out) as arrays:
        assert arrays["u"].tolist() == [[0, 0], [1, 1], [2, 2]]
        assert arrays["step"].tolist() == [10, 10, 10]
    options = "--tap flux --array u --transforms jvp,transpose --device 0"
    assert run("export", path, out, *options.split()) == 0
    with np.load(out) as arrays:
        assert arrays["u"].tolist() == [[0, 0], [2, 2], [4, 4]]
    for wrong, text in (
        (["--tap", "flux", "--device", "5"], "no events of flux"),
        (["--tap", "nothing"], "no tap 'nothing'"),
        (["--tap", "flux", "--array", "w"], "no array 'w'"),
        (["--tap", "flux", "--mesh", tmp_path / "missing.msh"], "missing.msh"),
    ):
        assert run("export", path, out, *wrong) == 1
        assert text in capsys.readouterr().err
    assert run("export", path, tmp_path / "x.csv", "--tap", "flux") == 1
    assert "one of .npz" in capsys.readouterr().err
