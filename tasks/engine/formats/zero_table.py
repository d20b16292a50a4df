"""Homes as rows of a catalog's table, and rows as ranges of files.

A range of a flat vector is cut into boxes of its tensor; a row's locator is the exact range of the box's values in the file, so that no
index beside the table is needed. Many rows share one record, whose checksum is kept per record.
"""

from bisect import bisect_right

from reports.errors import FormatError
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor, locate_tensor
from tasks.engine.formats.reader import Checked, Payload
from tasks.engine.formats.torch_files import TorchTensors, checked_record
from tasks.engine.formats.zero_homes import Home, Part, Placement
from tasks.engine.formats.zero_states import TorchFile
from tasks.engine.formats.zero_walk import REMEDY
from tasks.engine.tensors.catalog import Fragment, Locator, SourceTensor, TableBuilder
from tasks.engine.tensors.flat import boxes_of_range
from tasks.engine.tensors.region import Region
from validators.expectation import ITEMSIZE


class HomeTable:
    """Collects homes into a catalog's table, and finds the payloads of its rows."""

    def __init__(self) -> None:
        self.builder = TableBuilder()
        self._wholes = TorchTensors()
        self._whole_names: set[tuple[str, str]] = set()
        self._vectors: dict[tuple[str, str, int], int] = {}
        self._records: dict[str, dict[int, Checked]] = {}
        self._absolute: dict[str, str] = {}
        self._starts: dict[str, list[int]] = {}

    def add(self, fqn: str, home: Home) -> SourceTensor:
        """Append one tensor's rows.

        Args:
            fqn: the tensor's name.
            home: where its values are.

        Returns:
            The tensor, with its rows.

        Raises:
            FormatError: a damaged record, or a dtype that a release cannot hold.
        """
        first, dtype = self.builder.nrows, ""
        for part in home.parts:
            dtype = _code(fqn, part, dtype)
            for region, locator in self._rows(fqn, home, part, dtype):
                self.builder.add(region.offset, region.shape, locator.path, locator.start, locator.nbytes)
        return SourceTensor(fqn, home.shape, dtype or "F32", first, self.builder.nrows)

    def replicas(self, fqn: str, home: Home) -> list[Fragment]:
        """Return the fragments of a second copy of a tensor that has its rows already.

        Args:
            fqn: the tensor's name.
            home: where the copy's values are.

        Returns:
            Fragments whose index is -1.

        Raises:
            FormatError: a damaged record.
        """
        made = []
        for part in home.parts:
            dtype = _code(fqn, part, "")
            made += [Fragment(fqn, region, dtype, locator, -1) for region, locator in self._rows(fqn, home, part, dtype)]
        return made

    def payload(self, fragment: Fragment) -> Payload:
        """Find the raw values of a row, or of a replica.

        Args:
            fragment: of a tensor that was added.

        Returns:
            Where the values are.

        Raises:
            FormatError: the record around them is damaged.
        """
        path = fragment.locator.path
        if (path, fragment.fqn) in self._whole_names:
            return self._wholes.payload(fragment)
        start, nbytes = fragment.locator.start, fragment.locator.nbytes
        return Payload(self._absolute[path], start, nbytes, None, None, self._record_at(path, start))

    def _rows(self, fqn: str, home: Home, part: Part, dtype: str) -> list[tuple[Region, Locator]]:
        path = part.file.found.path
        if part.extent is None:
            region = Region.whole(home.shape)
            if part.tensor.shape != home.shape:
                raise FormatError(f"{fqn} has shape {part.tensor.shape} here, {home.shape} by its record", where=part.file.where)
            _, start, nbytes = self._wholes.add(path, fqn, region.offset, part.file.archive, part.tensor)
            self._whole_names.add((path, fqn))
            return [(region, Locator(path, start, nbytes))]
        itemsize, made = ITEMSIZE[dtype], []
        behind = part.extent.at + part.extent.stop - part.extent.start
        if len(part.tensor.shape) != 1 or part.tensor.shape[0] < behind:
            raise FormatError(
                f"{fqn} reaches to element {behind} of a vector of shape {part.tensor.shape}", where=part.file.where, remedy=REMEDY
            )
        at = self._first_byte(part.file, part.tensor, dtype) + part.extent.at * itemsize
        placed = part.placement or Placement(home.shape, (0,) * len(home.shape))
        for region in boxes_of_range(placed.shape, part.extent.start, part.extent.stop):
            made.append((region.moved(placed.shift), Locator(path, at, region.numel * itemsize)))
            at += region.numel * itemsize
        return made

    def _first_byte(self, file: TorchFile, vector: StoredTensor, dtype: str) -> int:
        # Of a flat vector; asked of the archive once.
        path = file.found.path
        key = (path, vector.storage.key, vector.storage_offset)
        found = self._vectors.get(key)
        if found is None:
            place = locate_tensor(file.archive, vector, dtype)
            if place.strides is not None:
                raise FormatError("a flat vector is stored with gaps", where=file.where)
            found = self._vectors[key] = place.start
            record = checked_record(file.archive, place.record)
            if record is not None:
                self._records.setdefault(path, {})[record.start] = record
                self._starts[path] = sorted(self._records[path])
            self._absolute[path] = file.found.absolute
        return found

    def _record_at(self, path: str, start: int) -> Checked | None:
        starts = self._starts.get(path, [])
        at = bisect_right(starts, start) - 1
        return self._records[path][starts[at]] if at >= 0 else None


def _code(fqn: str, part: Part, before: str) -> str:
    code = DTYPES.get(part.tensor.dtype)
    if code is None:
        raise FormatError(
            f"{fqn} has dtype {part.tensor.dtype}, which a release cannot hold", where=part.file.where, remedy="Drop or cast it."
        )
    if before not in ("", code):
        raise FormatError(f"{fqn} is {before} and {code} in the files of different ranks; parts of two saves?", where=part.file.where)
    return code
