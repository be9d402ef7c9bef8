"""Exports of recordings, read back with the libraries they are for."""

import re
import subprocess
import sys
import unicodedata
import urllib.parse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ceedtap as ct
from ceedtap import recording_export

STEPS = np.arange(0, 12, 2)
U = np.linspace(0, 1, 12).reshape(4, 3) + STEPS[:, None, None]
TYPES = ["bool", "int8", "int64", "uint16", "float16", "float32", "bfloat16"]


@pytest.fixture
def run(tmp_path):
    """Six events of each tap: a field, arrays of many types, numbers, complex numbers."""
    fields, lone, types, wave = (ct.Tap(name) for name in ("fields", "lone", "types", "wave"))

    @jax.jit
    def program(step, u):
        ct.id_tap(fields, {"step": step, "u": u, "ok": step > 4})
        ct.id_tap(lone, u[0])
        ct.id_tap(types, {name: jnp.full((2,), step).astype(name) for name in TYPES})
        ct.id_tap(wave, 1j * u[0])

    with ct.record(tmp_path / "run.ctap"):
        for step, u in zip(STEPS, U, strict=True):
            program(step, u)
    with ct.open(tmp_path / "run.ctap") as run:
        yield run


@pytest.fixture(params=[1, 16 << 20], ids=["small blocks", "large blocks"])
def block_bytes(request, monkeypatch):
    monkeypatch.setattr(recording_export, "BLOCK_BYTES", request.param)


def check(dataset, run):
    np.testing.assert_array_equal(dataset["u"], U)
    assert dataset["u"].dims == ("event", "u_0", "u_1")
    np.testing.assert_array_equal(dataset["ok"], STEPS > 4)
    assert dataset["ok"].dtype == bool
    np.testing.assert_array_equal(dataset["step"], STEPS)
    np.testing.assert_array_equal(dataset["time"], run["fields"].times)
    np.testing.assert_array_equal(dataset["device"], 0)
    assert set(dataset.coords) == {"step", "time", "device"}
    assert set(dataset.data_vars) == {"u", "ok"}


def test_xarray(run):
    pytest.importorskip("xarray")
    check(run["fields"].to_xarray(), run)
    lone = run["lone"].to_xarray()
    assert (lone.name, lone.dims) == ("lone", ("event", "lone_0"))
    np.testing.assert_array_equal(lone, U[:, 0])
    np.testing.assert_array_equal(run["lone"][2:].to_xarray().step, [2, 3, 4, 5])
    types = run["types"].to_xarray()
    assert types["bfloat16"].dtype == np.float32
    np.testing.assert_array_equal(types["bfloat16"][:, 0], STEPS)
    np.testing.assert_array_equal(run["wave"].to_xarray(), 1j * U[:, 0])


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize(("suffix", "engine"), [(".nc", "h5netcdf"), (".zarr", "zarr")])
def test_netcdf_and_zarr(suffix, engine, run, tmp_path):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip(engine)
    path = tmp_path / f"out{suffix}"
    options = {"consolidated": False} if engine == "zarr" else {}
    for _ in range(2):  # the second time it is replaced
        run["fields"].export(path)
    with xarray.open_dataset(path, engine=engine, **options) as dataset:
        check(dataset, run)
    run["types"].export(tmp_path / f"types{suffix}")
    with xarray.open_dataset(tmp_path / f"types{suffix}", engine=engine, **options) as dataset:
        for name in TYPES:
            assert dataset[name].dtype == (np.float32 if name == "bfloat16" else name)
            np.testing.assert_array_equal(dataset[name][:, 1], STEPS.astype(bool) if name == "bool" else STEPS)


@pytest.mark.usefixtures("block_bytes")
def test_parquet(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    run["fields"].export(tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["step", "time", "device", "u", "ok"] or set(table.column_names) == {
        "step", "time", "device", "u", "ok"
    }  # fmt: skip
    np.testing.assert_array_equal(table["u"].to_pylist(), U)
    assert table["ok"].to_pylist() == (STEPS > 4).tolist()
    assert table["step"].to_pylist() == STEPS.tolist()
    np.testing.assert_array_equal(table["time"].to_numpy(), run["fields"].times)
    run["types"].export(tmp_path / "types.parquet")
    assert parquet.read_table(tmp_path / "types.parquet")["int8"].to_pylist() == [[s, s] for s in STEPS]


@pytest.mark.usefixtures("block_bytes")
def test_npz(run, tmp_path):
    run["fields"].export(tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert set(arrays) == {"step", "time", "device", "u", "ok"}
        np.testing.assert_array_equal(arrays["u"], U)
        np.testing.assert_array_equal(arrays["time"], run["fields"].times)
    run["wave"].export(tmp_path / "wave.npz")
    with np.load(tmp_path / "wave.npz") as arrays:
        np.testing.assert_array_equal(arrays["wave"], 1j * U[:, 0])


#: Names that some format, file system or library cannot have, or has for itself.
AWKWARD = [
    "vel", "vel/max", "vel/max/", "/vel", "//", "vel\\max", "vel%2Fmax", "%", "", ".", "..", "...",
    ".zarray", "zarr.json",
    "__init__", "_nc4_non_coord_vel", "u", "U", "uU", "Uu", "UU", "u_0", "u_1",
    "ß", "ss", "Stra\u00dfe", "\u00e9", "e\u0301",
    "\u6e29\u5ea6", "\U0001f321", "a b", " a", "a ", "a\tb", "a\nb", "a\0b", "\x7f", "\u202e",
    "a.b", "a:b", "a*b?", "<a & \"b\">",
    "1", "-1", "event", "step_", "time", "device", "Time", "vel.npy", "vel.npy.npy", "x" * 5000, "x" * 5000 + "y",
    "\u00e9" * 3000,
]  # fmt: skip


@pytest.fixture(scope="module", params=["awkward", "", ".", "a/b", "step", "\u6e29/\u5ea6" * 100])
def named(request, tmp_path_factory):
    """Five events of a tap of this name, of which each array has its own number; and the names of its arrays."""
    name = request.param
    names = [*AWKWARD, "step"] if name == "awkward" else [""]
    path = tmp_path_factory.mktemp("named") / "run.ctap"

    @jax.jit
    def program(i):
        values = {leaf: jnp.full((2,), n) + 1000 * i for n, leaf in enumerate(names)}
        if "step" in names:
            values["step"] = i
        ct.id_tap(lambda *_, **__: None, values if name == "awkward" else values[""], what=name)

    with ct.record(path):
        for i in range(5):
            program(i)
    with ct.open(path) as run:
        yield run[name], names


def contents(path):
    """The arrays of a file by name, with the attribute that says another one."""
    suffix = path.suffix
    if suffix == ".npz":
        with np.load(path) as arrays:
            return {key: (arrays[key], None) for key in arrays}
    if suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(path)
        return {key: (np.array(table[i].to_pylist()), None) for i, key in enumerate(table.column_names)}
    xarray = pytest.importorskip("xarray")
    options = {"consolidated": False} if suffix == ".zarr" else {}
    pytest.importorskip({".nc": "h5netcdf"}.get(suffix, "zarr"))
    with xarray.open_dataset(path, engine={".nc": "h5netcdf"}.get(suffix, "zarr"), **options) as dataset:
        return {key: (of.values, of.attrs.get("long_name")) for key, of in dataset.variables.items()}


@pytest.mark.parametrize("suffix", [".nc", ".parquet", ".zarr", ".npz"])
def test_any_names_come_back(suffix, named, tmp_path):
    series, names = named
    for _ in range(2):
        series.export(tmp_path / f"out{suffix}")
    found = contents(tmp_path / f"out{suffix}")
    np.testing.assert_array_equal(found.pop("step")[0], np.arange(5))
    assert {"time", "device"} <= set(found)
    arrays = {key: value for key, value in found.items() if key not in ("time", "device")}
    assert len(arrays) == len([name for name in names if name != "step"])
    seen = set()
    for key, (values, long_name) in arrays.items():
        assert values.shape == (5, 2), key
        np.testing.assert_array_equal(values - values[:1], 1000 * np.arange(5)[:, None].repeat(2, 1))
        number = int(values[0, 0])
        seen.add(number)
        own = names[number] or series.tap or "value"
        # The name itself, but for one that is taken or too long for a format that can say it elsewhere.
        back = urllib.parse.unquote(key)
        assert back.rstrip("_") == own.rstrip("_") or (
            suffix in (".nc", ".zarr") and urllib.parse.unquote(long_name) == own
        )
        assert long_name is None or suffix in (".nc", ".zarr")
        if suffix in (".nc", ".zarr"):
            assert len(key.encode()) <= 255
    assert len(seen) == len(arrays)
    if suffix == ".zarr":  # on file systems that do not tell capitals or ways to write an accent
        folded = {unicodedata.normalize("NFD", path.name.casefold()) for path in (tmp_path / "out.zarr").iterdir()}
        assert len(folded) == len(list((tmp_path / "out.zarr").iterdir()))
        assert len(list((tmp_path / "out.zarr").iterdir())) == len(found) + 2  # the step and zarr's own file
    assert len(list(tmp_path.iterdir())) == 1


def test_any_names_in_xarray(named):
    pytest.importorskip("xarray")
    series, names = named
    dataset = series.to_xarray()
    if len(names) == 1:
        assert dataset.shape == (5, 2)
        return
    for number, name in enumerate(names):
        if name != "step":
            own = name or series.tap
            key = own if own not in ("event", "time", "device") else f"{own}_"
            np.testing.assert_array_equal(dataset[key][0], number)
    assert len(dataset.data_vars) == len(names) - 1


def test_any_names_in_vtu(tmp_path):
    meshio = pytest.importorskip("meshio")
    mesh = ct.mesh.box(1, 1)
    tap = ct.Tap('tap/of "this"')
    with ct.record(tmp_path / "run.ctap"):
        ct.id_tap(tap, {name: jnp.full((4,), number) for number, name in enumerate(AWKWARD)})
    with ct.open(tmp_path / "run.ctap") as run:
        run[tap.name].export(tmp_path / "out.pvd", mesh=mesh)
    data = meshio.read(tmp_path / "out" / "000000.vtu").point_data
    assert len(data) == len(AWKWARD)
    for key, values in data.items():
        own = AWKWARD[int(values[0])] or tap.name
        assert urllib.parse.unquote(key).rstrip("_") == own.rstrip("_")


def test_arrays_whose_paths_read_the_same_are_told_apart(tmp_path):
    tap = ct.Tap("nested")
    values = {"a.b": 1, "a": {"b": 2, "b.c": 3}, "a.b.c": 4, "a.b_": 5}
    with ct.record(tmp_path / "run.ctap"):
        ct.id_tap(tap, values)
    with ct.open(tmp_path / "run.ctap") as run:
        series = run["nested"]
        assert len(series.leaves) == 5
        assert sorted(int(series[leaf][0]) for leaf in series.leaves) == [1, 2, 3, 4, 5]
        assert next(series.events()).value == values
        series.export(tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert sorted(int(arrays[key][0]) for key in arrays if key not in ("step", "time", "device")) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("suffix", [".nc", ".parquet", ".zarr", ".npz"])
def test_no_events(suffix, run, tmp_path):
    pytest.importorskip({".nc": "h5netcdf", ".parquet": "pyarrow", ".zarr": "zarr", ".npz": "numpy"}[suffix])
    with pytest.raises(ValueError, match="no events of lone to export"):
        run["lone"][:0].export(tmp_path / f"x{suffix}")


def test_what_cannot_be_exported(run, tmp_path):
    with pytest.raises(ValueError, match=r"one of \.npz, \.nc, \.zarr, \.parquet, \.pvd; got"):
        run["lone"].export(tmp_path / "x.csv")
    for suffix, module in ((".nc", "h5netcdf"), (".parquet", "pyarrow")):
        pytest.importorskip(module)
        with pytest.raises(ValueError, match="has no complex numbers, and wave is complex128"):
            run["wave"].export(tmp_path / f"x{suffix}")
    with pytest.raises(ValueError, match="needs mesh="):
        run["lone"].export(tmp_path / "x.pvd")
    with pytest.raises(ValueError, match=r"mesh= is for \.pvd"):
        run["lone"].export(tmp_path / "x.npz", mesh=ct.mesh.box(1, 1))
    with pytest.raises(TypeError, match="got int"):
        run["lone"].export(tmp_path / "x.pvd", mesh=3)


@pytest.mark.parametrize("module", ["xarray", "h5netcdf", "zarr", "pyarrow"])
def test_a_missing_package_is_named(module, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    suffix = {"h5netcdf": ".nc", "pyarrow": ".parquet", "zarr": ".zarr"}.get(module)
    with pytest.raises(ImportError, match=rf"needs {module}: pip install ceedtap\[record\]"):
        run["lone"].export(tmp_path / f"x{suffix}") if suffix else run["lone"].to_xarray()


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("dim", [2, 3])
def test_vtu_series(dim, degree, tmp_path):
    meshio = pytest.importorskip("meshio")
    mesh = ct.mesh.box(*[2] * dim)
    if degree == 1:
        nodes, where = mesh.points, mesh
    else:
        where = ct.Space(ct.Ceed("/cpu/self"), mesh, degree=2)
        nodes = where.nodes
    fields = ct.Tap("fields")
    cells = np.arange(mesh.num_cells)

    @jax.jit
    def program(t):
        ct.id_tap(fields, {"step": t, "u": t * jnp.sum(nodes, 1), "v": t * jnp.asarray(nodes), "c": t * cells, "x": 1})

    with ct.record(tmp_path / "run.ctap"):
        for t in range(3):
            program(t)
    with ct.open(tmp_path / "run.ctap") as run:
        run["fields"].export(tmp_path / "out.pvd", mesh=where)
    listing = (tmp_path / "out.pvd").read_text()
    files = re.findall(r'timestep="(\d)" part="0" file="(.*?)"', listing)
    assert files == [(str(t), f"out/{t:06d}.vtu") for t in range(3)]
    for t, file in files:
        data = meshio.read(tmp_path / file)
        np.testing.assert_array_equal(data.points[:, :dim], nodes)
        np.testing.assert_allclose(data.point_data["u"], int(t) * nodes.sum(1))
        np.testing.assert_allclose(data.point_data["v"], int(t) * nodes)
        pieces = degree**dim
        (values,) = data.cell_data["c"]
        np.testing.assert_array_equal(values, int(t) * np.repeat(cells, pieces))
        # The pieces fill the mesh.
        corners = data.points[data.cells[0].data]
        assert np.isclose(np.prod(np.ptp(corners, axis=1)[:, :dim], axis=1).sum(), 1)


def test_fields_that_do_not_fit_the_mesh(run, tmp_path):
    pytest.importorskip("meshio")
    with pytest.raises(ValueError, match=r"the 9 nodes or 4 cells of the mesh; there are lone: \(3,\)"):
        run["lone"].export(tmp_path / "x.pvd", mesh=ct.mesh.box(2, 2))


def test_a_large_recording_is_exported_without_loading_it(tmp_path):
    """200 MB in a process that may use less on top of what the imports take."""
    code = """
import resource, sys, numpy as np, ceedtap as ct
with ct.open(sys.argv[1]) as run:
    assert run["t"].nbytes > 200e6
    first = run["t"][0].sum()
    def private():  # pages that are the process's own, not the file's
        return int(open("/proc/self/statm").read().split()[1]) - int(open("/proc/self/statm").read().split()[2])
    run["t"][:5].export(sys.argv[1] + ".npz")
    before = private()
    run["t"].export(sys.argv[1] + ".npz")
    print((private() - before) * resource.getpagesize() / 1e6)
"""
    tap = ct.Tap("t")
    f = jax.jit(lambda i: ct.id_tap(tap, jnp.full(500_000, i, float)))
    with ct.record(tmp_path / "run.ctap"):
        for i in range(51):
            f(i)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run.ctap"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100
    (tmp_path / "run.ctap").unlink()
    (tmp_path / "run.ctap.npz").unlink()
