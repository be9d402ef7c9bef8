"""Operators as matrices: diagonals, sparse matrices, multigrid levels, the inverse by fast diagonalisation."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ceedtap.ceed_basis import Basis
from ceedtap.ceed_constants import BASIS_NONE, REQUEST_IMMEDIATE, VECTOR_ACTIVE, EvalMode, Sentinel
from ceedtap.ceed_ffi import CeedAccessError, CeedUnsupportedError
from ceedtap.ceed_object import CeedObject, immediate, scalars
from ceedtap.ceed_restriction import ElemRestriction, StridedElemRestriction, _ElemRestriction, check_vector
from ceedtap.ceed_vector import Vector

if TYPE_CHECKING:
    import jax.experimental.sparse
    import scipy.sparse

    from ceedtap.ceed_operator import Operator, OperatorField

_Named = list[tuple[str, Vector]]


class Assembly(CeedObject):
    """What operators can do as matrices. The QFunction must be linear in the active inputs: libCEED probes it with unit
    vectors, at the values that the passive inputs have."""

    _passives: tuple[_Named, _Named] | None
    _fields: dict[str, OperatorField]

    @property
    @abc.abstractmethod
    def active_lengths(self) -> tuple[int, int]: ...

    @abc.abstractmethod
    def _check_usable(self) -> None: ...

    @abc.abstractmethod
    def _passive(self) -> tuple[_Named, _Named]: ...

    @staticmethod
    @abc.abstractmethod
    def _check_vectors(inputs: _Named, outputs: _Named) -> None: ...

    @abc.abstractmethod
    def _run(self, function: str, inputs: _Named, outputs: _Named, *args: Any, request: bool = True) -> None: ...

    @abc.abstractmethod
    def check(self) -> None: ...

    def _check_matrix(self) -> None:
        """That all parts have one; under the lock."""

    # -- diagonals -----------------------------------------------------------------------------------------------------

    def linear_assemble_diagonal(self, d: Vector, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Writes the diagonal of the operator's matrix to `d`, of the length of the active vectors.

        Raises:
            TypeError, ValueError: `d` is no such vector, or the matrix is not square.
            CeedAccessError: a vector is locked, or has no data.
        """
        self._assemble("CeedOperatorLinearAssembleDiagonal", d, request)

    def linear_assemble_add_diagonal(self, d: Vector, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Adds the diagonal of the operator's matrix to `d`."""
        self._assemble("CeedOperatorLinearAssembleAddDiagonal", d, request)

    def linear_assemble_point_block_diagonal(self, d: Vector, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Writes the blocks that couple the components of each node to `d`.

        Args:
            d: of ``ncomp`` times the active length: for each node a block of ncomp * ncomp values by rows.
            request: REQUEST_IMMEDIATE.

        Raises:
            CeedUnsupportedError: the number of components is not known here, see :meth:`ceedtap.Operator.wrap`.
            TypeError, ValueError, CeedAccessError: as :meth:`linear_assemble_diagonal`.
        """
        factor = self._block_size()
        self._assemble("CeedOperatorLinearAssemblePointBlockDiagonal", d, request, factor)

    def linear_assemble_add_point_block_diagonal(self, d: Vector, request: Sentinel = REQUEST_IMMEDIATE) -> None:
        """Adds to `d` what :meth:`linear_assemble_point_block_diagonal` writes to it."""
        factor = self._block_size()
        self._assemble("CeedOperatorLinearAssembleAddPointBlockDiagonal", d, request, factor)

    def _active_fields(self) -> list[OperatorField]:
        """Active fields of all parts; empty where they are not known."""
        return [field for field in self._fields.values() if field.vector is VECTOR_ACTIVE]

    def _block_size(self) -> int:
        sizes = {
            field.restriction.ncomp for field in self._active_fields() if isinstance(field.restriction, CeedObject)
        }
        if len(sizes) != 1:
            known = f"its active fields have {sorted(sizes)}" if sizes else "they are not known for this operator"
            raise CeedUnsupportedError(f"point blocks of {self!r} need one number of components: {known}")
        return int(sizes.pop())

    def _assemble(self, function: str, d: Vector, request: Sentinel, factor: int = 1) -> None:
        immediate(request)
        with self.ceed.lock:
            self._check_usable()
            self._check_matrix()
            lengths = self.active_lengths
            if lengths[0] != lengths[1] or not lengths[0]:
                raise ValueError(f"{self!r} has no square matrix: its active lengths are {lengths}")
            check_vector(self, "d", d, factor * lengths[0])
            inputs, outputs = self._passives or self._passive()
            outputs = [*outputs, ("d", d)]
            self._check_vectors(inputs, outputs)
            if "Add" in function:
                d._check_input("d")
            self._clear_inputs(inputs, outputs[:-1])
            self._run(function, inputs, outputs, d.pointer)

    def _clear_inputs(self, inputs: _Named, outputs: _Named) -> None:
        """Has libCEED forget the active input of the last apply; under the lock, after all checks.

        Probing sets one value after the other to one, and takes it that the rest is zero. Until 2026 libCEED's backends
        did not see to that (libCEED issue 1947): an operator with several active input values gave a wrong
        matrix once it was applied. Applied to zeros, it gives the right one. Passive outputs keep what they have.
        """
        lengths = self.active_lengths
        if 0 in lengths:
            return
        if self.ceed.library.has("CeedVectorFilter"):  # younger than the correction
            return
        kept = []
        for _, vector in self._passive()[1]:
            with contextlib.suppress(CeedAccessError), vector.array_read() as values:
                kept.append((vector, values.copy()))
        u, v = Vector(self.ceed, lengths[0]), Vector(self.ceed, lengths[1])
        u.set_value(0)
        self._run("CeedOperatorApply", [*inputs, ("u", u)], [*outputs, ("v", v)], u.pointer, v.pointer)
        for vector, values in kept:
            with vector.array_write() as array:
                array[:] = values

    # -- QFunction and sparse matrix -----------------------------------------------------------------------------------

    def linear_assemble_qfunction(self, request: Sentinel = REQUEST_IMMEDIATE) -> tuple[Vector, StridedElemRestriction]:
        """The matrix of the QFunction at each quadrature point.

        Returns:
            a vector, and a restriction that brings it to the quadrature points of each element. The component
            ``i * n_out + o`` is the derivative of output value `o` by input value `i`, where the values of the active
            fields are numbered one after the other.

        Raises:
            CeedUnsupportedError: for a composite operator; use its parts.
        """
        immediate(request)
        ffi = self.ceed.library.ffi
        if hasattr(self, "sub_operators"):
            raise CeedUnsupportedError(f"{self!r}: assemble the QFunctions of its sub_operators")
        with self.ceed.lock:
            self.check()
            inputs, outputs = self._passives or self._passive()
            self._check_vectors(inputs, outputs)
            self._clear_inputs(inputs, outputs)
            vector, restriction = ffi.new("CeedVector *"), ffi.new("CeedElemRestriction *")
            self._run("CeedOperatorLinearAssembleQFunction", inputs, outputs, vector, restriction)
            return Vector._adopt(self.ceed, vector), StridedElemRestriction._adopt(self.ceed, restriction)

    def linear_assemble_qfunction_build_or_update(
        self, assembled: Vector | None = None, rstr: StridedElemRestriction | None = None
    ) -> tuple[Vector, StridedElemRestriction]:
        """As :meth:`linear_assemble_qfunction`, into what an earlier call returned; libCEED keeps what it needs for it.

        Args:
            assembled, rstr: what an earlier call for this operator returned; None: new ones are made.

        Returns:
            `assembled` and `rstr`, or new ones.

        Raises:
            TypeError, ValueError: only one of both, or others than an earlier call returned.
            CeedAccessError: a vector is locked.
        """
        known = self._assembled
        if (assembled is not None or rstr is not None) and (
            known is None or known[0] is not assembled or known[1] is not rstr
        ):
            raise ValueError(
                "assembled, rstr: expected what the last call for this operator returned, or None for both"
            )
        if hasattr(self, "sub_operators"):
            raise CeedUnsupportedError(f"{self!r}: assemble the QFunctions of its sub_operators")
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        with self.ceed.lock:
            self.check()
            if assembled is not None:
                assembled._check_output("assembled")
            inputs, outputs = self._passives or self._passive()
            self._check_vectors(inputs, outputs)
            self._clear_inputs(inputs, outputs)
            # Both are libCEED's own: the vector stays with the operator, so its values are copied.
            vector, restriction = ffi.new("CeedVector *"), ffi.new("CeedElemRestriction *")
            self._run("CeedOperatorLinearAssembleQFunctionBuildOrUpdate", inputs, outputs, vector, restriction)
            values = Vector.values_of(self.ceed, vector[0])
            lib.CeedVectorDestroy(vector)
            if assembled is not None and rstr is not None:
                lib.CeedElemRestrictionDestroy(restriction)
                assembled.set_array(values)
                return assembled, rstr
            new = Vector(self.ceed, values.size)
            new.set_array(values)
            self._assembled = new, StridedElemRestriction._adopt(self.ceed, restriction)
            return self._assembled

    _assembled: tuple[Vector, StridedElemRestriction] | None = None

    def set_qfunction_assembly_reuse(self, reuse_assembly_data: bool) -> None:
        """Says whether assembled QFunctions are kept for the next assembly.

        They are then computed again only after :meth:`set_qfunction_assembly_data_update_needed` or `set_context`.
        """
        self._call("CeedOperatorSetQFunctionAssemblyReuse", self.pointer, bool(reuse_assembly_data))

    def set_qfunction_assembly_data_update_needed(self, needs_data_update: bool) -> None:
        """Says that kept assembled QFunctions are out of date, since passive data has changed."""
        self._call("CeedOperatorSetQFunctionAssemblyDataUpdateNeeded", self.pointer, bool(needs_data_update))

    def assembly_data_strip(self) -> None:
        """Frees the data that is kept for assembly.

        Raises:
            CeedUnsupportedError: libCEED is older than 1.0; drop the operator instead.
        """
        self._call("CeedOperatorAssemblyDataStrip", self.pointer)

    def linear_assemble_symbolic(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the entries that :meth:`linear_assemble` computes: two int32 arrays of their number.

        The same place may come several times; the values are to be added.
        """
        with self.ceed.lock:
            rows, columns = self._places("CeedOperatorLinearAssembleSymbolic")
            self._num_entries = rows.size
        return rows, columns

    def linear_assemble_point_block_diagonal_symbolic(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the entries that :meth:`linear_assemble_point_block_diagonal` computes: two int32 arrays.

        Raises:
            CeedUnsupportedError: the number of components is not known here, see :meth:`ceedtap.Operator.wrap`.
        """
        self._block_size()
        with self.ceed.lock:
            return self._places("CeedOperatorLinearAssemblePointBlockDiagonalSymbolic")

    def linear_assemble_get_num_entries(self) -> int:
        """How many entries :meth:`linear_assemble` computes."""
        return int(self.linear_assemble_symbolic()[0].size)

    def _places(self, function: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns that libCEED allocates; under the lock."""
        ffi, lib = self.ceed.library.ffi, self.ceed.library.lib
        self.check()
        self._check_matrix()
        if 0 in self.active_lengths:
            raise ValueError(f"{self!r} has no matrix: its active lengths are {self.active_lengths}")
        count, pointers = ffi.new("CeedSize *"), ffi.new("CeedInt *[2]")
        self._call(function, self.pointer, count, pointers, pointers + 1)
        arrays = []
        for pointer in pointers:
            data = ffi.buffer(ffi.cast("char *", pointer), 4 * count[0]) if count[0] else b""
            arrays.append(np.frombuffer(data, np.int32).copy())
            lib.free(pointer)
        return arrays[0], arrays[1]

    def linear_assemble(self, values: Vector) -> None:
        """Computes the entries of the matrix, in the order of :meth:`linear_assemble_symbolic`.

        Args:
            values: as many entries as there are rows; overwritten.

        Raises:
            TypeError, ValueError, CeedAccessError: `values` is no such vector, or a vector is locked.
        """
        with self.ceed.lock:
            self._check_usable()
            if getattr(self, "_num_entries", None) is None:
                self.linear_assemble_symbolic()
            check_vector(self, "values", values, self._num_entries)
            inputs, outputs = self._passives or self._passive()
            outputs = [*outputs, ("values", values)]
            self._check_vectors(inputs, outputs)
            self._clear_inputs(inputs, outputs[:-1])
            self._run("CeedOperatorLinearAssemble", inputs, outputs, values.pointer, request=False)

    _num_entries: int

    def _coo(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
        with self.ceed.lock:
            rows, columns = self.linear_assemble_symbolic()
            values = Vector(self.ceed, rows.size)
            values.set_value(0)
            self.linear_assemble(values)
            lengths = self.active_lengths
            return rows, columns, values.to_numpy(copy=True), (lengths[1], lengths[0])

    def to_scipy(self, format: str = "csr") -> scipy.sparse.sparray:
        """The operator's matrix as a SciPy sparse array, shape (output length, input length).

        Args:
            format: SciPy's name of the storage, ``"csr"``, ``"csc"``, ``"coo"``...; only COO keeps
                duplicates.
        """
        import scipy.sparse

        rows, columns, values, shape = self._coo()
        return scipy.sparse.coo_array((values, (rows, columns)), shape=shape).asformat(format)

    def to_bcoo(self) -> jax.experimental.sparse.BCOO:
        """The operator's matrix as a JAX sparse array, shape (output length, input length), duplicates not summed.

        Raises:
            TypeError: JAX has 64-bit numbers switched off, and libCEED computes in double precision.
        """
        import jax.numpy as jnp
        from jax.experimental import sparse

        from ceedtap.dlpack import check_x64

        check_x64(self.ceed.library.scalar_dtype)
        rows, columns, values, shape = self._coo()
        indices = jnp.asarray(np.stack([rows, columns], axis=1))
        return sparse.BCOO((jnp.asarray(values), indices), shape=shape)

    # -- multigrid and inverse -----------------------------------------------------------------------------------------

    def multigrid_create(
        self, p_mult_fine: Vector, rstr_coarse: ElemRestriction, basis_coarse: Basis
    ) -> tuple[Operator, Operator, Operator]:
        """A p-multigrid level: coarse operator, prolongation, restriction.

        Prolongation is interpolation in each element, averaged over the elements that share a node; restriction is its
        transpose; the coarse operator has the QFunction and the passive data of this one.

        Args:
            p_mult_fine: in how many L-vectors each entry of the active one is: ones, unless the L-vector is a part of
                a larger one that others share.
            rstr_coarse: restriction of the coarse L-vector.
            basis_coarse: coarse basis, with the quadrature points of this operator.

        Returns:
            ``(coarse, prolong, restrict)``.

        Raises:
            TypeError, ValueError: parts that do not fit this operator.
            CeedUnsupportedError: a composite operator, one whose fields are not known, or with several active bases.
        """
        return self._multigrid("CeedOperatorMultigridLevelCreate", p_mult_fine, rstr_coarse, basis_coarse, None)

    def multigrid_create_tensor_h1(
        self,
        p_mult_fine: Vector,
        rstr_coarse: ElemRestriction,
        basis_coarse: Basis,
        interp_C_to_F: npt.ArrayLike,
    ) -> tuple[Operator, Operator, Operator]:
        """As :meth:`multigrid_create`, for tensor bases, with the one-dimensional interpolation given.

        Args:
            p_mult_fine, rstr_coarse, basis_coarse: as there.
            interp_C_to_F: values at the fine nodes of the coarse basis functions, shape (P1d fine, P1d coarse).
        """
        function = "CeedOperatorMultigridLevelCreateTensorH1"
        return self._multigrid(function, p_mult_fine, rstr_coarse, basis_coarse, interp_C_to_F)

    def multigrid_create_h1(
        self,
        p_mult_fine: Vector,
        rstr_coarse: ElemRestriction,
        basis_coarse: Basis,
        interp_C_to_F: npt.ArrayLike,
    ) -> tuple[Operator, Operator, Operator]:
        """As :meth:`multigrid_create`, for H1 bases on any element, tensor products too, with the interpolation given.

        Args:
            p_mult_fine, rstr_coarse, basis_coarse: as there.
            interp_C_to_F: values at the fine nodes of the coarse basis functions, shape (fine nodes, coarse nodes).
        """
        function = "CeedOperatorMultigridLevelCreateH1"
        return self._multigrid(function, p_mult_fine, rstr_coarse, basis_coarse, interp_C_to_F)

    def _active_basis(self, what: str) -> tuple[Basis, _ElemRestriction]:
        """The one basis of the active fields, and their restriction."""
        fields = self._active_fields()
        if hasattr(self, "sub_operators") or not fields:
            raise CeedUnsupportedError(f"{what} needs a single operator whose fields are known, not {self!r}")
        # By kind and size: two bases that are built alike are fine.
        bases = {repr(field.basis): field.basis for field in fields}
        restrictions = {repr(field.restriction): field.restriction for field in fields}
        basis, restriction = next(iter(bases.values())), next(iter(restrictions.values()))
        if len(bases) > 1 or len(restrictions) > 1 or basis is BASIS_NONE or not isinstance(basis, Basis):
            raise CeedUnsupportedError(f"{what} needs one active basis and restriction; {self!r} has {[*bases]}")
        assert isinstance(restriction, _ElemRestriction)
        return basis, restriction

    def _multigrid(
        self, function: str, mult: Any, rstr: Any, coarse: Any, interp: npt.ArrayLike | None
    ) -> tuple[Operator, Operator, Operator]:
        fine, fine_rstr = self._active_basis("multigrid")
        tensor = hasattr(fine, "P1d")
        if not isinstance(rstr, ElemRestriction):
            raise TypeError(f"rstr_coarse: expected an ElemRestriction, got {rstr!r}")
        if not isinstance(coarse, Basis):
            raise TypeError(f"basis_coarse: expected a Basis, got {coarse!r}")
        self._check_same_ceed("rstr_coarse", rstr)
        self._check_same_ceed("basis_coarse", coarse)
        if rstr.nelem != fine_rstr.nelem or rstr.ncomp != fine_rstr.ncomp:
            raise ValueError(f"rstr_coarse: {rstr!r} has other elements or components than {fine_rstr!r}")
        for name in ("dim", "ncomp", "num_quadrature_points"):
            if getattr(coarse, name) != getattr(fine, name):
                raise ValueError(f"basis_coarse: {coarse!r} has another {name} than {fine!r}")
        if rstr.elemsize != coarse.num_nodes:
            raise ValueError(f"rstr_coarse: {rstr!r} does not fit {coarse!r}")
        any_basis = function.endswith("LevelCreateH1")
        if hasattr(coarse, "P1d") != tensor and not any_basis:
            raise ValueError(f"basis_coarse: {coarse!r} and {fine!r} must both be tensor products, or neither")
        if not tensor and function.endswith("TensorH1"):
            raise CeedUnsupportedError("the bases are no tensor products: use multigrid_create_h1")
        matrix: list[Any] = []
        if interp is not None:
            sizes = fine.num_nodes, coarse.num_nodes
            if not any_basis:
                sizes = fine.P1d, coarse.P1d  # type: ignore[attr-defined]
            values = scalars("interp_C_to_F", interp, sizes[0] * sizes[1], self.ceed)
            matrix = [self.ceed.library.ffi.cast("CeedScalar *", values.ctypes.data)]
        with self.ceed.lock:
            self.check()
            check_vector(self, "p_mult_fine", mult, fine_rstr.lsize)
            mult._check_input("p_mult_fine")
            boxes = [self.ceed.library.ffi.new("CeedOperator *") for _ in range(3)]
            self._call(function, self.pointer, mult.pointer, rstr.pointer, coarse.pointer, *matrix, *boxes)
            derive: Callable[..., Operator] = self._derive  # type: ignore[attr-defined]
            fields = {
                name: field._replace(restriction=rstr, basis=coarse) if field.vector is VECTOR_ACTIVE else field
                for name, field in self._fields.items()
            }
            keep = (mult, rstr, coarse, interp)
            qf = self.qfunction  # type: ignore[attr-defined]
            return (
                derive(boxes[0], f"coarse level of {self!r}", keep, _fields=fields, qfunction=qf),
                derive(boxes[1], f"prolongation from {coarse.num_nodes} to {fine.num_nodes} nodes", keep),
                derive(boxes[2], f"restriction from {fine.num_nodes} to {coarse.num_nodes} nodes", keep),
            )

    def create_fdm_element_inverse(self, request: Sentinel = REQUEST_IMMEDIATE) -> Operator:
        """The inverse of each element's matrix by fast diagonalisation, summed over the elements.

        It is the inverse of the operator on one affine element with constant coefficients, but for a shift of the
        Laplacian by 1e-4 (1e-6 in three dimensions) of the mass that libCEED makes, and an approximation, good as a
        smoother, on others (Lottes and Fischer, "Hybrid multigrid/Schwarz algorithms for the spectral element
        method", 2005).

        Raises:
            CeedUnsupportedError: the active basis is no tensor product, or there are several.
        """
        immediate(request)
        basis, _ = self._active_basis("the FDM inverse")
        if not hasattr(basis, "P1d"):
            raise CeedUnsupportedError(f"the FDM inverse needs a tensor basis, not {basis!r}")
        modes = {field.eval_mode for field in self._active_fields()}
        if not modes <= {EvalMode.INTERP, EvalMode.GRAD}:
            raise CeedUnsupportedError("the FDM inverse needs active fields with EVAL_INTERP or EVAL_GRAD")
        with self.ceed.lock:
            self.check()
            inputs, outputs = self._passives or self._passive()
            self._check_vectors(inputs, outputs)
            self._clear_inputs(inputs, outputs)
            box = self.ceed.library.ffi.new("CeedOperator *")
            self._run("CeedOperatorCreateFDMElementInverse", inputs, outputs, box)
            return self._derive(box, f"FDM inverse of {self!r}")  # type: ignore[attr-defined]
