"""Random sequences of valid and invalid calls of libCEED's objects, against numpy.

A sequence makes a few objects on one Ceed and calls their methods in any order, with right and wrong arguments, with
views, exports and aliases that come and go. Every few calls the vectors are compared with a model in numpy; a call that
should not work must raise one of the documented exceptions and change nothing.

Run: python tests/fuzz/fuzz_ceed.py [--sequences N] [--seed S] [--seconds T]
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import sys
import time
from typing import Any

import numpy as np

from ceedtap import ceed as ct
from ceedtap.ceed_backends import backends
from ceedtap.ceed_ffi import CeedError, load

EXPECTED = (TypeError, ValueError, CeedError, BufferError, KeyError, MemoryError)
GARBAGE: list[Any] = [None, -1, 0, 1.5, "x", b"x", 2**31, 2**70, np.nan, [], {}, object(), np.zeros(3, np.float32)]


class Slot:
    """A vector and what it should hold; None while that is nothing, or not known."""

    def __init__(self, vector: ct.Vector) -> None:
        self.vector = vector
        self.values: np.ndarray | None = None
        self.holds: list[np.ndarray] = []  # arrays that lock it against writing
        self.writer: np.ndarray | None = None  # an export for writing
        self.view = ""  # a view by get_array...
        self.read_only = False

    @property
    def readable(self) -> bool:
        return self.values is not None and self.writer is None and self.view not in ("get_array", "get_array_write")

    @property
    def free(self) -> bool:
        return not self.holds and self.writer is None and not self.view

    @property
    def writable(self) -> bool:
        return self.free and not self.read_only


class World:
    """The objects of a Ceed that all its sequences share."""

    def __init__(self, name: str) -> None:
        self.ceed = ceed = ct.Ceed(name)
        rng = np.random.default_rng(0)
        self.n = n = 3
        self.offsets = np.arange(3) + 2 * np.arange(n)[:, None]
        self.lsize, self.qsize = 2 * n + 1, 4 * n
        self.restriction = ceed.ElemRestriction(n, 3, 1, 1, self.lsize, self.offsets)
        self.points = ceed.StridedElemRestriction(n, 4, 1, self.qsize, [1, 4, 4])
        self.basis = ceed.BasisTensorH1Lagrange(1, 1, 3, 4, ct.GAUSS)
        self.interp = self.basis.get_interp_1d()
        self.qf = ceed.QFunctionByName("MassApply")
        self.data = rng.random((n, 4))
        self.qdata = ceed.Vector(self.qsize)
        self.qdata.set_array(self.data)
        self.op = self.operator(self.qdata)
        u, e = self.restriction.create_vector()
        assert u is not None
        assert e is not None
        self.gather = np.zeros((e.get_length(), self.lsize))  # the restriction's matrix, in this backend's order
        for j in range(self.lsize):
            u.set_array(np.eye(self.lsize)[j])
            self.restriction.apply(u, e)
            self.gather[:, j] = e.to_numpy()
        self.esize = len(e)

    def operator(self, qdata: ct.Vector) -> ct.Operator:
        op = self.ceed.Operator(self.qf)
        op.set_field("u", self.restriction, self.basis, ct.VECTOR_ACTIVE)
        op.set_field("qdata", self.points, ct.BASIS_NONE, qdata)
        op.set_field("v", self.restriction, self.basis, ct.VECTOR_ACTIVE)
        return op

    def matrix(self, data: np.ndarray) -> np.ndarray:
        matrix = np.zeros((self.lsize, self.lsize))
        for offsets, weights in zip(self.offsets, data.reshape(self.n, 4), strict=True):
            matrix[np.ix_(offsets, offsets)] += self.interp.T @ np.diag(weights) @ self.interp
        return matrix


class Sequence:
    """One sequence."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        lengths = (world.lsize, world.lsize, world.esize, world.qsize, rng.choice([0, 1, 5, world.lsize]))
        self.slots = [Slot(world.ceed.Vector(length)) for length in lengths]
        self.log: list[str] = []
        self.valid = 0

    def numbers(self, n: int) -> np.ndarray:
        return np.array([self.rng.uniform(-2, 2) for _ in range(n)])

    def expect(self, works: bool, name: str, call: Any) -> bool:
        """Calls; that it works or raises as it should."""
        self.log.append(f"{name}{'' if works else ' (invalid)'}")
        try:
            call()
        except EXPECTED as error:
            if works:
                raise AssertionError(f"{name} should have worked: {error!r}") from error
            return False
        if not works:
            raise AssertionError(f"{name} should not have worked")
        self.valid += 1
        return True

    def check(self) -> None:
        for i, slot in enumerate(self.slots):
            if slot.readable and slot.values is not None:
                with slot.vector.array_read() as values:
                    if not np.allclose(values, slot.values, rtol=1e-11, atol=1e-11, equal_nan=True):
                        raise AssertionError(f"vector {i} holds {values}, expected {slot.values}")

    def run(self, steps: int) -> None:
        for _ in range(steps):
            getattr(self, "do_" + self.rng.choice(ACTIONS))(self.rng.choice(self.slots))
            if self.rng.random() < 0.2:
                self.check()
        self.check()

    # -- actions -------------------------------------------------------------------------------------------------------

    def do_set_value(self, slot: Slot) -> None:
        value = self.rng.uniform(-2, 2)
        if self.expect(slot.writable, "set_value", lambda: slot.vector.set_value(value)):
            slot.values = np.full(len(slot.vector), value)

    def do_set_array(self, slot: Slot) -> None:
        values = self.numbers(len(slot.vector))
        if self.expect(slot.free, "set_array", lambda: slot.vector.set_array(values)):
            slot.values, slot.read_only = values.copy(), False

    def do_share(self, slot: Slot) -> None:
        values = self.numbers(len(slot.vector))
        mode = ct.USE_POINTER
        if self.expect(slot.free, "set_array USE_POINTER", lambda: slot.vector.set_array(values, cmode=mode)):
            slot.values, slot.read_only = values.copy(), False

    def do_wrong_array(self, slot: Slot) -> None:
        n = len(slot.vector)
        wrong = self.rng.choice(
            [np.zeros(n + 1), np.zeros(n, np.float32), np.zeros(n, np.int64), np.zeros(n, ">f8"), "text", None, {}]
        )
        self.expect(False, "set_array of something wrong", lambda: slot.vector.set_array(wrong))

    def do_from_dlpack(self, slot: Slot) -> None:
        values = self.numbers(len(slot.vector))
        values.flags.writeable = self.rng.random() < 0.5
        slot.vector = ct.Vector.from_dlpack(self.world.ceed, values)
        slot.holds, slot.writer, slot.view = [], None, ""
        slot.values, slot.read_only = values.copy(), not values.flags.writeable

    def do_scale(self, slot: Slot) -> None:
        if self.expect(slot.writable and slot.readable, "scale", lambda: slot.vector.scale(0.5)):
            slot.values = 0.5 * np.asarray(slot.values)

    def do_norm(self, slot: Slot) -> None:
        kind = self.rng.choice([ct.NORM_1, ct.NORM_2, ct.NORM_MAX])
        result: list[float] = []
        if self.expect(slot.readable, "norm", lambda: result.append(slot.vector.norm(kind))) and len(slot.vector):
            want = np.linalg.norm(np.asarray(slot.values), {0: 1, 1: 2, 2: np.inf}[int(kind)])
            assert np.isclose(result[0], want), (result, want)

    def do_axpy(self, slot: Slot) -> None:
        other = self.rng.choice(self.slots)
        good = slot.writable and slot.readable and other.readable and other is not slot
        good = good and len(other.vector) == len(slot.vector)
        if self.expect(good, "axpy", lambda: slot.vector.axpy(2.0, other.vector)):
            slot.values = np.asarray(slot.values) + 2 * np.asarray(other.values)

    def do_copy_from(self, slot: Slot) -> None:
        other = self.rng.choice(self.slots)
        good = other.readable and len(other.vector) == len(slot.vector) and (slot.free or other is slot)
        if self.expect(good, "copy_from", lambda: slot.vector.copy_from(other.vector)) and other is not slot:
            slot.values, slot.read_only = np.array(other.values), False

    def do_hold(self, slot: Slot) -> None:
        how = self.rng.choice([lambda v: v.to_numpy(), np.asarray, np.from_dlpack, lambda v: v.to_numpy()[:1]])
        arrays: list[np.ndarray] = []
        if self.expect(slot.readable, "an alias for reading", lambda: arrays.append(how(slot.vector))):
            assert not arrays[0].flags.writeable
            slot.holds.append(arrays[0])

    def do_export(self, slot: Slot) -> None:
        arrays: list[np.ndarray] = []
        good = slot.writable and slot.readable
        make = slot.vector.exported(write=True)
        if self.expect(good, "an export for writing", lambda: arrays.append(np.from_dlpack(make))):
            arrays[0][:] = slot.values = self.numbers(len(slot.vector))
            slot.writer = arrays[0]

    def do_capsule(self, slot: Slot) -> None:
        """One that nobody consumes."""
        self.expect(slot.readable, "a capsule", lambda: slot.vector.__dlpack__(max_version=(1, 0)))

    def do_let_go(self, slot: Slot) -> None:
        slot.holds, slot.writer = [], None

    def do_view(self, slot: Slot) -> None:
        name = self.rng.choice(["get_array", "get_array_read", "get_array_write"])
        good = slot.readable and slot.view != "get_array_read" if name == "get_array_read" else slot.writable
        if name == "get_array":
            good = good and slot.readable
        if name == "get_array_read" and slot.view:
            return  # several may be out; one is enough here
        arrays: list[np.ndarray] = []
        if self.expect(good, name, lambda: arrays.append(getattr(slot.vector, name)())):
            slot.view = name
            if name != "get_array_read":
                arrays[0][:] = slot.values = self.numbers(len(slot.vector))

    def do_restore(self, slot: Slot) -> None:
        read = self.rng.random() < 0.5
        name = "restore_array_read" if read else "restore_array"
        good = slot.view == "get_array_read" if read else slot.view in ("get_array", "get_array_write")
        if self.expect(good, name, getattr(slot.vector, name)):
            slot.view = ""

    def do_apply(self, slot: Slot) -> None:
        out = self.rng.choice(self.slots)
        n = self.world.lsize
        good = slot.readable and out.writable and out is not slot and len(slot.vector) == len(out.vector) == n
        add = self.rng.random() < 0.3
        good = good and (out.readable or not add)
        method = self.world.op.apply_add if add else self.world.op.apply
        if self.expect(good, method.__name__, lambda: method(slot.vector, out.vector)):
            result = self.world.matrix(self.world.data) @ np.asarray(slot.values)
            out.values = result + (np.asarray(out.values) if add else 0)

    def do_restrict(self, slot: Slot) -> None:
        out, world = self.rng.choice(self.slots), self.world
        transpose = self.rng.random() < 0.5
        sizes = (world.esize, world.lsize) if transpose else (world.lsize, world.esize)
        good = slot.readable and out.writable and out is not slot and (len(slot.vector), len(out.vector)) == sizes
        good = good and (out.readable or not transpose)
        apply = world.restriction.T.apply if transpose else world.restriction.apply
        if self.expect(good, "restriction", lambda: apply(slot.vector, out.vector)):
            matrix = world.gather.T if transpose else world.gather
            result = matrix @ np.asarray(slot.values)
            out.values = result + (np.asarray(out.values) if transpose else 0)

    def do_own_operator(self, slot: Slot) -> None:
        """An operator whose passive data is a vector of the sequence, or something wrong."""
        world = self.world
        if len(slot.vector) != world.qsize:
            self.expect(False, "set_field", lambda: world.operator(slot.vector))
            return
        op, v = world.operator(slot.vector), world.ceed.Vector(world.lsize)
        u = world.ceed.Vector(world.lsize)
        u.set_value(1)
        if self.expect(slot.readable, "apply", lambda: op.apply(u, v)):
            want = world.matrix(np.asarray(slot.values)) @ np.ones(world.lsize)
            assert np.allclose(v.to_numpy(), want)
        if slot.readable and self.rng.random() < 0.3:
            op.linear_assemble_diagonal(v)
            assert np.allclose(v.to_numpy(), np.diag(world.matrix(np.asarray(slot.values))))
            assert np.allclose(op.to_scipy().toarray(), world.matrix(np.asarray(slot.values)))

    def do_garbage(self, slot: Slot) -> None:
        """Wrong things to every maker and method."""
        world, rng = self.world, self.rng
        ceed, any_ = world.ceed, lambda: rng.choice(GARBAGE)
        calls = [
            lambda: ceed.Vector(rng.choice([-1, 1.5, "x", None, 2**70])),
            lambda: ceed.ElemRestriction(2, 2, 1, 1, 3, [0, 1, 2, rng.choice([3, -1, 2**31])]),
            lambda: ceed.ElemRestriction(rng.choice([None, -1, 1.5, "x", 2**31]), 2, 1, 1, 3, any_()),
            lambda: ceed.OrientedElemRestriction(2, 2, 1, 1, 3, [0, 1, 1, 2], rng.choice([[0] * 4, [True] * 3, None])),
            lambda: ceed.StridedElemRestriction(2, 2, 1, rng.choice([3, -4, None]), [1, 2, 2]),
            lambda: ceed.BlockedElemRestriction(2, 2, rng.choice([0, -1, None]), 1, 1, 3, [0, 1, 1, 2]),
            lambda: ceed.BasisTensorH1Lagrange(rng.choice([0, 4, None]), 1, 3, 4, ct.GAUSS),
            lambda: ceed.BasisHdiv(ct.TRIANGLE, 1, 3, 2, any_(), any_(), any_(), any_()),
            lambda: ceed.QFunctionByName(rng.choice(["", "Nope", None, "Mass", "\0"])),
            lambda: ceed.QFunctionContext(rng.choice([{}, {"a": "b"}, {"a b": 1}, 3])),
            lambda: ceed.Operator(any_()),
            lambda: world.op.apply(any_(), any_()),
            lambda: world.op.apply(slot.vector, slot.vector),
            lambda: world.op.set_field("u", any_(), any_(), any_()),
            lambda: world.op.linear_assemble_diagonal(ceed.Vector(world.lsize + 1)),
            lambda: world.op.set_context(rng.choice(["x", "", None]), 1.0),
            lambda: world.op.multigrid_create(any_(), any_(), any_()),
            lambda: world.basis.apply(1, rng.choice([0, 4, 8, 3, None]), slot.vector, slot.vector),
            lambda: world.basis.get_div(),
            lambda: slot.vector.exported(len(slot.vector) + 1),
            lambda: slot.vector.norm(rng.choice([7, None, "x"])),
            lambda: slot.vector.axpy(1.0, any_()),
            lambda: ct.Vector.from_dlpack(ceed, any_()),
            lambda: ct.Vector.wrap(rng.choice([0, -8, 3, None, "x"]), ceed),
            lambda: ct.Vector.wrap(slot.vector.address, OTHER_CEED()),
            lambda: slot.vector.__dlpack__(max_version=(1, 0), stream=1),
            lambda: slot.vector.__dlpack__(),
        ]
        self.expect(False, "garbage", rng.choice(calls))

    def do_forget(self, slot: Slot) -> None:
        """A vector goes, with whatever is out of it, and a new one takes its place."""
        slot.vector = self.world.ceed.Vector(len(slot.vector))
        kept = slot.holds if self.rng.random() < 0.5 else []  # which stay good memory
        slot.values, slot.holds, slot.writer, slot.view, slot.read_only = None, [], None, "", False
        for array in kept:
            array.sum()

    def do_wrapped(self, slot: Slot) -> None:
        """Another handle of the same vector."""
        wrapped = ct.Vector.wrap(slot.vector.address, self.world.ceed)
        assert len(wrapped) == len(slot.vector)
        if slot.readable and len(slot.vector):
            assert np.allclose(wrapped.to_numpy(), np.asarray(slot.values))
        elif slot.values is None and not slot.view and len(slot.vector):
            self.expect(False, "a wrapped vector without data", wrapped.to_numpy)


_other: list[ct.Ceed] = []


def OTHER_CEED() -> ct.Ceed:
    if not _other:
        _other.append(ct.Ceed("/cpu/self/ref/serial"))
    return _other[0]


ACTIONS = [name[3:] for name in dir(Sequence) if name.startswith("do_")]
ACTIONS += ["apply", "apply", "set_array", "let_go", "let_go", "restore", "garbage", "restrict"]


def memory() -> float:
    """Resident memory now, in MB."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def fuzz(sequences: int, seed: int, seconds: float = float("inf"), steps: int = 12) -> dict[str, Any]:
    """Runs sequences; returns what was done. AssertionError with the seed of the sequence that shows a mistake."""
    worlds = [World(name) for name in backends(load()).working]
    start, calls, valid, marks = time.perf_counter(), 0, 0, []
    done = 0
    for done in range(1, sequences + 1):
        rng = random.Random(f"{seed} {done}")
        sequence = Sequence(rng.choice(worlds), rng)
        try:
            sequence.run(steps)
        except BaseException as error:
            error.add_note(f"sequence {done} of seed {seed}, {sequence.world.ceed!r}: {', '.join(sequence.log)}")
            raise
        calls, valid = calls + len(sequence.log), valid + sequence.valid
        if done % max(sequences // 20, 1) == 0:
            gc.collect()
            marks.append(memory())
        if time.perf_counter() - start > seconds:
            break
    return {"sequences": done, "calls": calls, "valid": valid, "MB": marks, "seconds": time.perf_counter() - start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    result = fuzz(options.sequences, options.seed, options.seconds)
    first, *_, last = result["MB"]
    done = f"{result['sequences']} sequences, {result['calls']} calls ({result['valid']} valid)"
    print(f"{done} in {result['seconds']:.0f} s; memory {first:.1f} MB after the first part, {last:.1f} MB at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
