"""Recorded events as xarray, and in files of other formats. Files are written block by block, whatever their size."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ceedtap import recording_names
from ceedtap.protocol import DTYPES

if TYPE_CHECKING:
    from ceedtap.recording import Series

BLOCK_BYTES = 16 << 20
#: Element types that only the package `ml_dtypes` has, and what holds their values elsewhere.
_PLAIN = {
    dtype: np.dtype(np.float32 if "float" in dtype.name else np.uint8 if dtype.name.startswith("u") else np.int8)
    for dtype in DTYPES
    if dtype.isbuiltin != 1
}
#: Names of coordinates, and of the dimension of the events.
_TAKEN = ("event", "step", "time", "device")
#: Of a name in netCDF, which netCDF's own library restricts, and in zarr, where it is that of a directory.
_NAME_BYTES = 200
_TIME = {"units": "nanoseconds since 1970-01-01", "calendar": "proleptic_gregorian"}


def _need(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {module}: pip install ceedtap[record]") from error


def _plain(dtype: np.dtype) -> np.dtype:
    return _PLAIN.get(dtype, dtype)


def _variables(series: Series) -> dict[str, Series]:
    """The arrays of the events by names that are not empty and not those of coordinates."""
    if not len(series):
        raise ValueError(f"there are no events of {series.tap} to export")
    # The number of the step is a coordinate.
    leaves = [leaf for leaf in series.leaves if leaf != "step" or series[leaf].shape != (len(series),)]
    names = recording_names.distinct([recording_names.of_leaf(leaf, series.tap) for leaf in leaves], _TAKEN)
    return {name: series[leaf] for name, leaf in zip(names, leaves, strict=True)}


def _in_file(series: Series, max_bytes: int | None = None) -> dict[str, tuple[str, Series]]:
    """The same by names for a file, each with its own name."""
    found = _variables(series)
    quoted = recording_names.in_files(list(found), _TAKEN, max_bytes)
    return {quoted[name]: (name, of) for name, of in found.items()}


def _blocks(series: Series) -> Iterator[tuple[slice, np.ndarray]]:
    """The values of an array in pieces of a bounded size."""
    nbytes = max(1, series.nbytes // max(1, len(series)))
    count = max(1, BLOCK_BYTES // nbytes)
    for start in range(0, len(series), count):
        part = series[start : start + count]
        yield slice(start, start + len(part)), np.asarray(part, _plain(part.dtype))


def _dims(variables: dict[str, Series]) -> dict[str, tuple[str, ...]]:
    shapes = {name: of.shape[1:] for name, of in variables.items()}
    return {name: ("event", *dims) for name, dims in recording_names.dimensions(shapes, _TAKEN).items()}


def _own_name(own: str) -> dict[str, str]:
    """An attribute that says the whole name of an array whose name has been cut."""
    name = recording_names.quoted(own)
    return {"long_name": name} if len(name.encode()) > _NAME_BYTES else {}


def _coordinates(series: Series) -> dict[str, np.ndarray]:
    return {"step": series.steps, "time": series.times.view(np.int64), "device": series.devices}


def _no_complex(what: str, variables: dict[str, Series]) -> None:
    for name, series in variables.items():
        if series.dtype.kind == "c":
            raise ValueError(f"{what} has no complex numbers, and {name} is {series.dtype}; use .npz or .zarr")


def to_xarray(series: Series) -> Any:
    """See :meth:`ceedtap.recording.Series.to_xarray`."""
    xarray = _need("xarray", "to_xarray")
    coordinates = {
        "step": ("event", series.steps), "time": ("event", series.times), "device": ("event", series.devices)
    }  # fmt: skip
    variables = _variables(series)
    dims = _dims(variables)
    data = {name: (dims[name], np.asarray(of, _plain(of.dtype))) for name, of in variables.items()}
    dataset = xarray.Dataset(data, coordinates)
    return dataset[next(iter(data))] if len(series.leaves) == len(data) == 1 else dataset


def export(series: Series, path: str, mesh: Any) -> None:
    """See :meth:`ceedtap.recording.Series.export`."""
    suffix = os.path.splitext(path.rstrip("/"))[1]
    if suffix == ".pvd":
        from ceedtap import recording_vtu

        recording_vtu.write(series, path, mesh)
        return
    if suffix not in _WRITERS:
        known = ", ".join([*_WRITERS, ".pvd"])
        raise ValueError(f"export: the suffix of a file says its format, one of {known}; got {path!r}")
    if mesh is not None:
        raise ValueError(f"export: mesh= is for .pvd files, got {path!r}")
    _WRITERS[suffix](series, path)


def _write_npz(series: Series, path: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        arrays: dict[str, Any] = _coordinates(series) | {name: of for name, (_, of) in _in_file(series).items()}
        arrays["time"] = series.times
        for name, array in arrays.items():
            dtype = _plain(array.dtype)
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_2_0(file, header)
                blocks = [(None, array)] if isinstance(array, np.ndarray) else _blocks(array)
                for _, block in blocks:
                    file.write(np.ascontiguousarray(block).tobytes())


def _write_netcdf(series: Series, path: str) -> None:
    h5netcdf = _need("h5netcdf", "export to netCDF")
    _need("h5py", "export to netCDF")
    names = _in_file(series, _NAME_BYTES)
    variables = {name: of for name, (_, of) in names.items()}
    all_dims = _dims(variables)
    _no_complex("netCDF", variables)
    with h5netcdf.File(path, "w") as file:
        file.dimensions["event"] = len(series)
        for name, values in _coordinates(series).items():
            variable = file.create_variable(name, ("event",), values.dtype, data=values)
            if name == "time":
                variable.attrs.update(_TIME)
        for name, of in variables.items():
            dims = all_dims[name]
            for dim, size in zip(dims[1:], of.shape[1:], strict=True):
                file.dimensions[dim] = size
            dtype = _plain(of.dtype)
            is_bool = dtype == np.bool_
            variable = file.create_variable(name, dims, np.dtype(np.int8) if is_bool else dtype)
            variable.attrs.update({"coordinates": "step time device", **_own_name(names[name][0])})
            if is_bool:
                variable.attrs["dtype"] = "bool"  # as xarray does
            for where, block in _blocks(of):
                variable[where] = block


def _write_zarr(series: Series, path: str) -> None:
    zarr = _need("zarr", "export to zarr")
    group = zarr.open_group(path, mode="w")
    for name, values in _coordinates(series).items():
        attributes = _TIME if name == "time" else {}
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, dimension_names=("event",), attributes=attributes
        )
        array[:] = values
    names = _in_file(series, _NAME_BYTES)
    dims = _dims({name: of for name, (_, of) in names.items()})
    for name, (own, of) in names.items():
        dtype = _plain(of.dtype)
        row = max(1, dtype.itemsize * int(np.prod(of.shape[1:])))
        chunks = (max(1, min(len(of), (1 << 20) // row)), *(max(1, size) for size in of.shape[1:]))
        array = group.create_array(name, shape=of.shape, chunks=chunks, dtype=dtype, dimension_names=dims[name])
        array.attrs.update({"coordinates": "step time device", **_own_name(own)})
        for where, block in _blocks(of):
            array[where] = block


def _write_parquet(series: Series, path: str) -> None:
    pyarrow = _need("pyarrow", "export to Parquet")
    parquet = importlib.import_module("pyarrow.parquet")
    variables = {name: of for name, (_, of) in _in_file(series).items()}
    _no_complex("Parquet", variables)

    def column(values: np.ndarray) -> Any:
        array = pyarrow.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            offsets = np.arange(0, len(array) + 1, size) if size else np.zeros(1 + len(values), np.int64)
            array = pyarrow.LargeListArray.from_arrays(offsets, array)
        return array

    coordinates = _coordinates(series)
    rows = max(1, BLOCK_BYTES * max(1, len(series)) // max(1, series.nbytes))
    writer = None
    try:
        for start in range(0, max(1, len(series)), rows):
            part = slice(start, start + rows)
            columns = {name: pyarrow.array(values[part]) for name, values in coordinates.items()}
            columns["time"] = columns["time"].cast(pyarrow.timestamp("ns", "UTC"))
            columns |= {name: column(np.asarray(of[part], _plain(of.dtype))) for name, of in variables.items()}
            table = pyarrow.table(columns)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


_WRITERS: dict[str, Callable[[Series, str], None]] = {
    ".npz": _write_npz, ".nc": _write_netcdf, ".zarr": _write_zarr, ".parquet": _write_parquet
}  # fmt: skip
