"""Recordings as arrays: the events of a tap by number, step and device, read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ceedtap.protocol import ArraySpec
from ceedtap.recording_definition import Definition
from ceedtap.recording_format import Layout, RecordingError
from ceedtap.recording_reader import Damage, FrameFile

if TYPE_CHECKING:
    from ceedtap.mesh import Mesh
    from ceedtap.routes import Transforms
    from ceedtap.shards import Shard
    from ceedtap.space import Space


@dataclass(frozen=True)
class Event:
    """One event of a tap.

    Attributes:
        tap: name of the tap.
        args: the tapped values, as a consumer gets them.
        labels: the keyword arguments of the tap.
        transforms: as a consumer gets them; empty for the values of the program itself.
        device: local number of the device that ran the program; -1: unknown.
        run_id: the same on all devices for one execution of a program.
        seq: counts the events of the process.
        time_ns: of emission, in nanoseconds since 1970.
        shard: of a program that ran on several devices: what of the tapped arrays the event has.
    """

    tap: str
    args: tuple[Any, ...]
    labels: dict[str, Any]
    transforms: Transforms
    device: int
    run_id: int
    seq: int
    time_ns: int
    shard: Shard | None = None

    @property
    def value(self) -> Any:
        """The tapped value, or a tuple of several."""
        return self.args[0] if len(self.args) == 1 else self.args


class Recording(Mapping[str, "Series"]):
    """A recording that has been opened; see :func:`open`. A mapping from names of taps to :class:`Series`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = FrameFile(path)
        kinds: dict[str, list[int]] = {}
        for kind, definition in enumerate(self._file.definitions):
            kinds.setdefault(definition.tap, []).append(kind)
        self._numbers = {tap: np.flatnonzero(np.isin(self._file.kinds, mine)) for tap, mine in kinds.items()}

    @property
    def path(self) -> str:
        """The file."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self._file.size

    @property
    def ended(self) -> bool:
        """Whether the recording was closed; otherwise its process was killed, or is still writing."""
        return self._file.ended

    @property
    def damage(self) -> Damage | None:
        """Where the first damaged byte is, if any. This compares the checksums of the whole file."""
        return self._file.check()

    def __getitem__(self, tap: str) -> Series:
        if tap not in self._numbers:
            names = ", ".join(map(repr, self._numbers)) or "none"
            raise KeyError(f"no tap {tap!r} in {self.path}; its taps: {names}")
        return Series(self._file, tap, self._numbers[tap])

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def num_events(self) -> int:
        """Events of all taps."""
        return len(self._file.offsets)

    def events(self) -> Iterator[Event]:
        """The events of all taps in the recorded order.

        Raises:
            RecordingError: an event is damaged; those before it have been given.
        """
        for number in range(self.num_events):
            yield event(self._file, number)

    def close(self) -> None:
        """Closes the file. Arrays that were read from it stay valid."""
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Recording {self.path}: {self.num_events} events of {', '.join(self) or 'no taps'}>"


def event(file: FrameFile, number: int) -> Event:
    """An event of a file."""
    definition = file.definitions[file.kinds[number]]
    leaves = file.leaves(number)
    args, labels = definition.arguments(leaves)
    device, run_id, seq, time_ns = (
        int(column[number]) for column in (file.devices, file.run_ids, file.seqs, file.times)
    )
    shard = definition.shard(file.part(number), leaves)
    return Event(definition.tap, args, labels, definition.transforms, device, run_id, seq, time_ns, shard)


class Series:
    """The events of one tap, or some of them; nothing is read before it is asked for.

    * ``series[i]`` is the value of an event, as its consumer gets it, and iterating goes over the values.
    * ``series[a:b]``, and ``series[mask]`` with a NumPy array of numbers or Booleans, is a series of some events.
    * ``series["u"]`` is the series of one of the arrays, by its name in `leaves`.
    * ``numpy.asarray(series)`` is one array of shape `shape`, where each event has one array and all have one shape.

    Arrays are views of the file, for reading.
    """

    def __init__(self, file: FrameFile, tap: str, numbers: npt.NDArray[np.intp], leaf: str | None = None) -> None:
        self._file = file
        self._numbers = numbers
        self._leaf = leaf
        self.tap = tap

    # -- what the events are -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the arrays of an event: ``("",)`` for a tap of a lone array."""
        if self._leaf is not None:
            return (self._leaf,)
        return tuple(dict.fromkeys(name for kind in self._kinds() for name in kind.leaves))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of events, then the shape of the array of an event.

        Raises:
            ValueError: an event has several arrays, or their shapes differ.
        """
        return (len(self), *self._one("shape"))

    @property
    def dtype(self) -> np.dtype:
        """Element type of the array of an event.

        Raises:
            ValueError: an event has several arrays, or their types differ.
        """
        found: np.dtype = self._one("dtype")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without their headers."""
        counts = zip(*np.unique(self._file.kinds[self._numbers], return_counts=True), strict=True)
        return sum(int(count) * sum(spec.nbytes for spec in self._specs(kind)) for kind, count in counts)

    @property
    def times(self) -> npt.NDArray[np.datetime64]:
        """When the program emitted the events, UTC."""
        return self._file.times[self._numbers].view("datetime64[ns]")

    @property
    def devices(self) -> npt.NDArray[np.int32]:
        """Local numbers of the devices that ran the program; -1: unknown."""
        return self._file.devices[self._numbers]

    @property
    def run_ids(self) -> npt.NDArray[np.uint64]:
        """The same for all events of one execution of a program."""
        return self._file.run_ids[self._numbers]

    @property
    def transforms(self) -> list[Transforms]:
        """`transforms` of every event; ``()`` for the values of the program itself."""
        return [self._file.definitions[kind].transforms for kind in self._file.kinds[self._numbers]]

    @property
    def labels(self) -> dict[str, Any]:
        """The keyword arguments of the tap; where programs tapped it with different ones, the first."""
        kinds = self._kinds()
        return dict(kinds[0].labels) if kinds else {}

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The step of every event: the value of its integer array `step` or of its label ``step=``, or else the
        running number among the recorded events of this tap with the same device and transforms."""
        file = self._file
        steps = np.zeros(len(file.kinds), np.int64)
        mine = [kind for kind, definition in enumerate(file.definitions) if definition.tap == self.tap]
        for transforms in {repr(file.definitions[kind].transforms) for kind in mine}:
            alike = [kind for kind in mine if repr(file.definitions[kind].transforms) == transforms]
            numbers = np.flatnonzero(np.isin(file.kinds, alike))
            for device in np.unique(file.devices[numbers]):
                same = numbers[file.devices[numbers] == device]
                steps[same] = np.arange(len(same))
        for kind in np.unique(file.kinds[self._numbers]).tolist():
            numbers = self._numbers[file.kinds[self._numbers] == kind]
            label = file.definitions[kind].labels.get("step")
            position = self._step_position(kind)
            if position is not None:
                steps[numbers] = [int(file.leaves(number)[position]) for number in numbers.tolist()]
            elif type(label) is int:
                steps[numbers] = label
        return steps[self._numbers]

    def _step_position(self, kind: int) -> int | None:
        """Which array of the events is a single integer called `step`."""
        for position, name in enumerate(self._file.definitions[kind].leaves):
            spec = self._layout(kind).specs[position]
            if name.rpartition(".")[2] == "step" and spec.shape == () and spec.dtype.kind in "iu":
                return position
        return None

    # -- the events ----------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self.leaves:
                names = ", ".join(map(repr, self.leaves))
                raise KeyError(f"no array {key!r} in the events of {self.tap}; there are {names}")
            return Series(self._file, self.tap, self._numbers, key)
        chosen = self._numbers[key]
        if isinstance(chosen, np.ndarray):
            return Series(self._file, self.tap, chosen, self._leaf)
        if self._leaf is not None:
            return self._array(int(chosen))
        return event(self._file, int(chosen)).value

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self)):
            yield self[i]

    def events(self) -> Iterator[Event]:
        """The events with everything that is known of them."""
        for number in self._numbers.tolist():
            yield event(self._file, number)

    def select(self, *, device: int | None = None, steps: int | slice | None = None, transforms: Any = None) -> Series:
        """Some of the events.

        Args:
            device: those of this device.
            steps: those of this step, or of the steps from ``steps.start`` up to but not including ``steps.stop``.
            transforms: names of transformations, the innermost first: ``()`` selects the values of the program itself,
                ``("jvp", "transpose")`` the cotangents.
        """
        chosen = np.ones(len(self), bool)
        if device is not None:
            chosen &= self.devices == device
        if steps is not None:
            of = self.steps
            span = steps if isinstance(steps, slice) else slice(steps, steps + 1)
            if span.step is not None:
                raise ValueError("steps: a slice without a step of its own; select(...)[::n] takes every n-th event")
            chosen &= (of >= span.start) if span.start is not None else True
            chosen &= (of < span.stop) if span.stop is not None else True
        if transforms is not None:
            names = (transforms,) if isinstance(transforms, str) else tuple(transforms)
            chosen &= np.array([tuple(name for name, _ in of) == names for of in self.transforms], bool)
        return Series(self._file, self.tap, self._numbers[chosen], self._leaf)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the events of a recording lie apart in the file; one array of them is a copy")
        out = np.empty(self.shape, self.dtype)
        for i, number in enumerate(self._numbers.tolist()):
            out[i] = self._array(number)
        return out if dtype is None else out.astype(dtype, copy=False)

    def __repr__(self) -> str:
        what = f"{self.tap}[{self._leaf!r}]" if self._leaf else self.tap
        return f"<Series {what}: {len(self)} events of {', '.join(map(str, self.array_types())) or 'nothing'}>"

    # -- exports -------------------------------------------------------------------------------------------------

    def to_xarray(self) -> Any:
        """The events as an `xarray.DataArray`, or an `xarray.Dataset` where an event has several arrays, with the
        coordinates `step`, `time` and `device`.

        Raises:
            ImportError: xarray is not installed.
            ValueError: shapes or types of the events differ; :meth:`select` some of them.
        """
        from ceedtap import recording_export

        return recording_export.to_xarray(self)

    def export(self, path: str | os.PathLike[str], *, mesh: Mesh | Space | None = None) -> None:
        """Writes the events to a file of another format.

        Args:
            path: its suffix says which: ``.npz`` (NumPy), ``.nc`` (netCDF), ``.zarr``, ``.parquet``, or ``.pvd`` (a
                series of VTU files for ParaView).
            mesh: for ``.pvd``: a :class:`ceedtap.mesh.Mesh` or, for fields of its nodes, a :class:`ceedtap.Space`.
                Arrays with one row for each node or for each cell are written.

        Arrays have their names, with what files cannot have percent-encoded (``vel/max`` is ``vel%2Fmax``), and ``_``
        after those of coordinates.

        Raises:
            ValueError: a suffix that is not known, no mesh, or events whose shapes or types differ.
            ImportError: a package that is needed is not installed.
        """
        from ceedtap import recording_export

        recording_export.export(self, os.fspath(path), mesh)

    # -- details -------------------------------------------------------------------------------------------------

    def _kinds(self) -> list[Definition]:
        return [self._file.definitions[kind] for kind in np.unique(self._file.kinds[self._numbers])]

    def _layout(self, kind: int) -> Layout:
        """That of the first of the chosen events of a kind; the others have the same."""
        number = self._numbers[np.argmax(self._file.kinds[self._numbers] == kind)]
        return self._file.layout(int(self._file.offsets[number]))

    def _specs(self, kind: int) -> list[ArraySpec]:
        """Shapes and types of the chosen arrays in events of a kind."""
        specs = self._layout(kind).specs
        names = self._file.definitions[kind].leaves
        return [spec for name, spec in zip(names, specs, strict=True) if self._leaf in (None, name)]

    def _one(self, attribute: str) -> Any:
        if len(self.leaves) != 1:
            names = ", ".join(map(repr, self.leaves)) or "none"
            count = len(self.leaves)
            raise ValueError(f"an event of {self.tap} has {count} arrays ({names}); choose one: series[name]")
        kinds = np.unique(self._file.kinds[self._numbers])
        found = {getattr(spec, attribute) for kind in kinds for spec in self._specs(kind)}
        if len(found) != 1:
            all_found = ", ".join(sorted(map(str, found))) or "none, there are no events"
            raise ValueError(f"the {attribute}s of {self.tap} differ: {all_found}; select some of the events")
        return found.pop()

    def array_types(self) -> list[str]:
        """Types and shapes of the arrays of an event, such as ``float64[3, 3]``."""
        kinds = np.unique(self._file.kinds[self._numbers])
        words = (f"{spec.dtype}[{', '.join(map(str, spec.shape))}]" for kind in kinds for spec in self._specs(kind))
        return list(dict.fromkeys(words))

    def _array(self, number: int) -> np.ndarray:
        leaves = self._file.leaves(number)
        names = self._file.definitions[self._file.kinds[number]].leaves
        if self._leaf is None:
            return leaves[0]
        if self._leaf not in names:
            raise RecordingError(f"event {number} of {self.tap} has no array {self._leaf!r}")
        return leaves[names.index(self._leaf)]


def open(path: str | os.PathLike[str]) -> Recording:
    """Opens a recording without loading it. One that was damaged, or that nobody closed, opens as far as it is good.

    Args:
        path: a file of :func:`ceedtap.record`.

    Returns:
        A mapping from names of taps to :class:`Series`; a context manager that closes the file.

    Raises:
        OSError: the file cannot be opened.
        RecordingError: it is no recording.

    >>> import ceedtap as ct, jax, numpy as np, tempfile
    >>> path = tempfile.mkdtemp() + "/run.ctap"
    >>> flux = ct.Tap("flux")
    >>> f = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: ct.id_tap(flux, {"step": i, "u": x})["u"] + i, x))
    >>> with ct.record(path):
    ...     _ = f(np.zeros(3))
    >>> run = ct.open(path)
    >>> run["flux"]["u"].shape
    (5, 3)
    >>> np.asarray(run["flux"]["u"].select(steps=slice(2, 4)))
    array([[1., 1., 1.],
           [3., 3., 3.]])
    """
    return Recording(path)
