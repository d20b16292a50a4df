"""Model tensors that lie in whole torch.save files (`.bin`, `.pt`): found by name and offset, placed when asked for."""

import os
from math import prod

from reports.errors import FormatError
from tasks.engine.containers.ranges import unreadable
from tasks.engine.containers.torch_dtypes import DTYPES
from tasks.engine.containers.torch_pickle import StoredTensor, locate_tensor
from tasks.engine.containers.torch_zip import Archive, open_archive
from tasks.engine.formats.reader import Checked, Payload
from tasks.engine.tensors.catalog import Fragment
from validators.expectation import ITEMSIZE


def open_torch_file(path: str) -> Archive:
    """Return the directory of a file that is one torch.save archive.

    Args:
        path: the file.

    Returns:
        Its records; none is read.

    Raises:
        FormatError: not such a file, cut short, or unreadable.
    """
    try:
        nbytes = os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error
    return open_archive(path, 0, nbytes)


class TorchTensors:
    """The tensors of several torch.save files."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, tuple[int, ...]], tuple[Archive, StoredTensor]] = {}

    def add(self, path: str, fqn: str, offset: tuple[int, ...], archive: Archive, tensor: StoredTensor) -> tuple[str, int, int]:
        """Keep one tensor, or one box of one.

        Args:
            path: the file as fragments name it.
            fqn: the tensor's name.
            offset: where its box begins.
            archive: the file.
            tensor: as its pickle describes it.

        Returns:
            dtype code, byte of the file at which its record begins, the record's length.

        Raises:
            FormatError: a dtype that a release cannot hold, or its record is absent.
        """
        code = DTYPES.get(tensor.dtype)
        if code is None:
            raise FormatError(f"{fqn} has dtype {tensor.dtype}, which a release cannot hold", where=archive.path, remedy="Drop or cast it.")
        self._places[path, fqn, offset] = (archive, tensor)
        if 0 in tensor.shape:
            return code, 0, 0
        record = archive.record(f"data/{tensor.storage.key}")
        return code, record.header_at, record.nbytes

    def payload(self, fragment: Fragment) -> Payload:
        """Find the raw values of a fragment.

        Args:
            fragment: of a tensor that was added.

        Returns:
            Where the values are.

        Raises:
            FormatError: the record is damaged, or has another length than its tensor needs.
        """
        archive, tensor = self._places[fragment.locator.path, fragment.fqn, fragment.region.offset]
        place = locate_tensor(archive, tensor, fragment.dtype)
        assert place.strides is not None or place.nbytes == prod(tensor.shape) * ITEMSIZE[fragment.dtype]
        part_of = None if place.is_whole else checked_record(archive, place.record)
        return Payload(archive.path, place.start, place.nbytes, place.strides, place.crc32, part_of)


def checked_record(archive: Archive, name: str) -> Checked | None:
    """Return where a record's bytes lie in its file, with the checksum recorded for them.

    Args:
        archive: the file.
        name: such as `data/0`.

    Returns:
        The range; None where the writer recorded no checksums.

    Raises:
        FormatError: the record is absent or its header damaged.
    """
    if not archive.has_crc32:
        return None
    record = archive.record(name)
    return Checked(archive.locate(name), record.nbytes, record.crc32)
