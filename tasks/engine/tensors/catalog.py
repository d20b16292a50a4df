"""What a checkpoint holds, without its bytes: tensors, their fragments, and the training state beside them.

A *fragment* is one box of one tensor with its place on disk. A *catalog* keeps the fragments of all tensors as arrays (a million of them
must not hurt) and makes `Fragment` values per tensor, on demand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np

from reports.errors import ShapeError
from tasks.engine.tensors.region import Ints, Region, check_tiling
from validators.expectation import ITEMSIZE

Fact = int | float | bool | str
Weights = Literal["stored", "master"]
STORED: Weights = "stored"
MASTER: Weights = "master"  # also the slot of a parameter's copy in high precision
OTHER_SLOT = "other"  # in keys of state tensors that belong to no parameter


@dataclass(frozen=True, slots=True)
class Locator:
    """A place in a checkpoint's files: `nbytes` bytes from `start` of `path` (relative to the catalog's `root`, or absolute for
    node-local roots). What lies there (a zip, raw values) is the format's business.
    """

    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """One box of one tensor, and where its bytes are. `index` is its row in the catalog's FragmentTable."""

    fqn: str
    region: Region
    dtype: str
    locator: Locator
    index: int


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor as its writer described it. `shape` is None where the format does not record the global shape; `first` and `last` bound
    its rows in the FragmentTable.
    """

    fqn: str
    shape: tuple[int, ...] | None
    dtype: str
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor; 0 while the shape is unknown."""
        return 0 if self.shape is None else prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class FragmentTable:
    """Columns of all fragments, tensor by tensor.

    `offsets` and `shapes` are flat: a fragment of a D-dim tensor takes D entries from `dims_at`; `file` indexes `files`.
    """

    files: tuple[str, ...]
    file: Ints
    start: Ints
    nbytes: Ints
    dims_at: Ints
    offsets: Ints
    shapes: Ints


@dataclass(frozen=True, slots=True)
class StateItem:
    """One entry of the training state that is no tensor in fragments: a scheduler, an RNG state, a file of the trainer's.

    `kind` is "object", or "tensor" where the catalog cannot say which bytes are whose (a dtype without a safetensors code, a file that is
    listed and not opened); shape and dtype are set for tensors. `places` are the bytes it is stored in, where they are known; `value` is a
    plain value that metadata records, such as a step count.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    places: tuple[Locator, ...] = ()
    value: int | str | None = None


@dataclass(frozen=True, slots=True)
class Catalog:
    """What a checkpoint holds. `tensors` are the model's, by FQN with wrapper prefixes stripped; `state_tensors` and `state` are the rest.

    `state_tensors` have the rows after the model's. A parameter's are keyed `<slot>/<parameter>`: `master` is its copy in high precision,
    `exp_avg`, `exp_avg_sq` and `step` are Adam's, others as the optimizer calls them. Tensors of no parameter are keyed `other/<key>`.

    `replicas` repeat a region that the table has already (another rank wrote it too) and must hold the same values; their `index` is -1.
    `stated` is what the trainer stored of the model beside its weights, in the words of families.dims and planning.stated.
    `digest` identifies the bytes as far as metadata can (sizes and times included). `notes` are sentences for the report. `weights` says
    whether `tensors` are the model's as stored or the optimizer's masters. `listed` are absolute paths of files, and the sha256 that their
    writer noted down of each.
    """

    format: str
    root: str
    step: int | None
    tensors: Mapping[str, SourceTensor]
    table: FragmentTable
    state: tuple[StateItem, ...]
    digest: str
    files_nbytes: int
    replicas: tuple[Fragment, ...] = ()
    notes: tuple[str, ...] = field(default=())
    state_tensors: Mapping[str, SourceTensor] = field(default_factory=dict)
    stated: Mapping[str, Fact] = field(default_factory=dict)
    weights: Weights = STORED
    listed: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_state_items(self) -> int:
        """Entries of the training state, tensors and others."""
        return len(self.state) + len(self.state_tensors)

    def tensor(self, key: str) -> SourceTensor:
        """Return one tensor, of the model or of the training state.

        Args:
            key: a key of `tensors` or `state_tensors`.

        Returns:
            The tensor.

        Raises:
            KeyError: neither has it.
        """
        found = self.tensors.get(key)
        return found if found is not None else self.state_tensors[key]

    def fragments(self, fqn: str, which: Sequence[int] | None = None) -> tuple[Fragment, ...]:
        """Return the fragments of one tensor, in the order of the table.

        Args:
            fqn: a key of `tensors` or `state_tensors`. Fragments are called as their format calls them: a master by its own key.
            which: only these, counted from the tensor's first; None for all.

        Returns:
            Its fragments; regions in elements of the whole tensor.
        """
        tensor, table = self.tensor(fqn), self.table
        offsets, shapes = self.boxes(fqn)
        made = []
        for at in range(tensor.last - tensor.first) if which is None else which:
            row = tensor.first + at
            region = Region(tuple(offsets[at].tolist()), tuple(shapes[at].tolist()))
            locator = Locator(table.files[int(table.file[row])], int(table.start[row]), int(table.nbytes[row]))
            made.append(Fragment(tensor.fqn, region, tensor.dtype, locator, row))
        return tuple(made)

    def boxes(self, fqn: str) -> tuple[Ints, Ints]:
        """Return offsets and shapes of one tensor's fragments, each (N, D).

        Args:
            fqn: a key of `tensors` or `state_tensors`.

        Returns:
            Offsets, shapes; both views of the table.
        """
        tensor, table = self.tensor(fqn), self.table
        count = tensor.last - tensor.first
        begin, end = int(table.dims_at[tensor.first]), int(table.dims_at[tensor.last])
        ndim = (end - begin) // count if count else len(tensor.shape or ())
        return table.offsets[begin:end].reshape(count, ndim), table.shapes[begin:end].reshape(count, ndim)

    def check_coverage(self, fqn: str, shape: Sequence[int]) -> None:
        """Prove that the fragments of `fqn` tile a tensor of `shape`.

        Args:
            fqn: a key of `tensors` or `state_tensors`.
            shape: its global shape, from the writer's metadata or the config.

        Raises:
            CoverageError: a hole, an overlap, or a fragment outside the shape.
        """
        offsets, shapes = self.boxes(fqn)
        check_tiling(fqn, shape, offsets, shapes, remedy=f"Restore the missing files of {self.root} or export another step.")


class TableBuilder:
    """Collects fragments, tensor by tensor, into a FragmentTable."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._rows: list[tuple[int, int, int]] = []
        self._dims_at: list[int] = [0]
        self._offsets: list[int] = []
        self._shapes: list[int] = []

    @property
    def nrows(self) -> int:
        """Fragments collected so far; the `first` of the next tensor."""
        return len(self._rows)

    def add(self, offset: Sequence[int], shape: Sequence[int], path: str, start: int, nbytes: int) -> None:
        """Append one fragment of the tensor being collected.

        Args:
            offset: first index per dim, in elements.
            shape: length per dim, in elements.
            path: file, relative to the checkpoint's root, or absolute.
            start: byte in the file where the fragment's record begins.
            nbytes: length of that record.

        Raises:
            ShapeError: offset and shape differ in length.
        """
        if len(offset) != len(shape):
            raise ShapeError(f"fragment with offset {tuple(offset)} but shape {tuple(shape)}", where=path)
        self._rows.append((self._files.setdefault(path, len(self._files)), start, nbytes))
        self._offsets.extend(offset)
        self._shapes.extend(shape)
        self._dims_at.append(len(self._offsets))

    def build(self) -> FragmentTable:
        """Close the table.

        Returns:
            The table of everything added.
        """
        rows = np.asarray(self._rows, dtype=np.int64).reshape(-1, 3)
        return FragmentTable(
            tuple(self._files),
            rows[:, 0].copy(),
            rows[:, 1].copy(),
            rows[:, 2].copy(),
            np.asarray(self._dims_at, dtype=np.int64),
            np.asarray(self._offsets, dtype=np.int64),
            np.asarray(self._shapes, dtype=np.int64),
        )
