"""Ways to damage a DCP folder, by torch's own metadata classes, zipfile and bytes; nothing of the product."""

import pickle
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

Edit = Callable[[object], None]


def edit_metadata(folder: Path, edit: Edit) -> None:
    """Unpickle `.metadata` with torch's classes, change it, pickle it again."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # our own file
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def place_of(folder: Path, fqn: str) -> tuple[Path, int, int]:
    """File, first byte and length of a tensor's first stored item."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    _index, place = next((i, p) for i, p in metadata.storage_data.items() if i.fqn == fqn)
    return folder / place.relative_path, place.offset, place.length


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def regions_of(item: bytes) -> dict[str, int]:
    """A byte inside each region of a torch.save archive: relative to its start."""
    with zipfile.ZipFile(BytesIO(item)) as archive:
        data = next(info for info in archive.infolist() if "/data/" in info.filename)
        pickled = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
        directory = archive.start_dir
    begin = {info: item.index(info.filename.encode(), info.header_offset) for info in (data, pickled)}
    extra = {info: int.from_bytes(item[info.header_offset + 28 : info.header_offset + 30], "little") for info in (data, pickled)}
    payload = {info: begin[info] + len(info.filename) + extra[info] for info in (data, pickled)}
    end = len(item)
    return {
        "first payload byte": payload[data],
        "last payload byte": payload[data] + data.file_size - 1,
        "local header magic": data.header_offset,
        "local header name length": data.header_offset + 26,
        "local header extra length": data.header_offset + 28,
        "local header name": begin[data],
        "pickle": payload[pickled] + pickled.file_size // 2,
        "pickle start": payload[pickled],
        "pickle end": payload[pickled] + pickled.file_size - 1,
        "directory magic": directory,
        "directory name": item.index(data.filename.encode(), directory),
        "directory crc": item.index(data.filename.encode(), directory) - 30,
        "directory size": item.index(data.filename.encode(), directory) - 22,
        "directory place": item.index(data.filename.encode(), directory) - 4,
        "end record magic": end - 22,
        "end record count": end - 12,
        "end record place": end - 6,
    }


class Bomb:
    """Pickles as a call that makes a file: the file's existence shows that something ran it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, (str(self.marker),)


def replace_pickle(item: bytes, bomb: Bomb) -> bytes:
    """The archive with its data.pkl replaced by a hostile one, written again by zipfile."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(item)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info.filename, pickle.dumps(bomb) if info.filename.endswith("/data.pkl") else old.read(info))
    return made.getvalue()
