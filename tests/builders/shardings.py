"""Random checkpoints in hand-made files: tensors cut into boxes, scattered over files with gaps between, some stored with strides.

`FakeReader` says where the boxes are, as a format would; nothing of the product's formats is used.
"""

import itertools
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from tasks.engine.formats.reader import CheckpointReader, Payload, Probe, Source
from tasks.engine.tensors.catalog import Catalog, Fragment, SourceTensor, TableBuilder

Arrays = dict[str, np.ndarray]  # raw values, unsigned
Box = tuple[tuple[int, ...], tuple[int, ...]]
ALIGNMENTS = (0, 1, 3, 64)


def cut(shape: tuple[int, ...], rng: random.Random, *, empties: bool = True) -> list[Box]:
    """Cut a shape into a grid of boxes: whole, rows, columns or rectangles, uneven; in any order, empty boxes among them."""
    boxes: list[Box] = [((), ())]
    for n in shape:
        inner = rng.sample(range(1, n), rng.randint(0, min(3, n - 1))) if n > 1 and rng.random() < 0.6 else []
        edges = [0, *sorted(inner), n]
        boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in itertools.pairwise(edges)]
    if empties and shape:
        boxes += [(tuple(rng.randint(0, n) for n in shape), (0, *shape[1:])) for _ in range(rng.randint(0, 2))]
        boxes = [(o if prod_of(s) else (o[0], *(0 for _ in o[1:])), s) for o, s in boxes]
    rng.shuffle(boxes)
    return boxes


def prod_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape."""
    return int(np.prod(shape, dtype=int))


@dataclass
class _Files:
    root: Path
    rng: random.Random
    contents: list[bytearray] = field(default_factory=lambda: [bytearray() for _ in range(3)])

    def store(self, values: np.ndarray) -> tuple[str, int, int, tuple[int, ...] | None]:
        content, at = self.rng.choice(list(zip(self.contents, range(3), strict=True)))
        content += self.rng.randbytes(self.rng.choice(ALIGNMENTS))
        start, strides = len(content), None
        if values.ndim > 1 and self.rng.random() < 0.3:
            order = self.rng.sample(range(values.ndim), values.ndim)  # stored in another order of dims
            stored = np.ascontiguousarray(values.transpose(order))
            steps = dict(zip(order, stored.strides, strict=True))
            strides = tuple(steps[d] // values.itemsize for d in range(values.ndim))
            content += stored.tobytes()
        else:
            content += values.tobytes()
        return f"part{at}.bin", start, len(content) - start, strides

    def close(self) -> None:
        for at, content in enumerate(self.contents):
            (self.root / f"part{at}.bin").write_bytes(content)


class FakeReader(CheckpointReader):
    """Knows where each box is. `dtypes` are safetensors codes by name; `crcs` says whether the writer recorded checksums."""

    name: ClassVar[str] = "fake"

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._root = source.path

    @classmethod
    def probe(cls, path: Path) -> Probe:
        """Never asked."""
        return Probe(False, f"{path} is the tests' own")

    @classmethod
    def write(cls, root: Path, tensors: Arrays, dtypes: dict[str, str], seed: int, *, crcs: bool = True, shapes: bool = True):
        """Cut `tensors` by `seed` and write them under `root`; without `shapes`, the catalog records no global shape."""
        root.mkdir(parents=True, exist_ok=True)
        rng, made, builder = random.Random(seed), {}, TableBuilder()
        files, places = _Files(root, rng), {}
        for name, values in tensors.items():
            first = builder.nrows
            for offset, extent in cut(values.shape, rng):
                part = values[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
                path, start, nbytes, strides = files.store(part)
                crc = zlib.crc32(bytes(files.contents[int(path[4])][start : start + nbytes])) if crcs else None
                places[builder.nrows] = (strides, crc)
                builder.add(offset, extent, path, start, nbytes)
            made[name] = SourceTensor(name, values.shape if shapes else None, dtypes[name], first, builder.nrows)
        files.close()
        reader = cls(Source(root))
        reader._places = places
        reader._made = Catalog("fake", str(root), None, made, builder.build(), (), f"seed {seed}", 0)
        return reader

    def _make_catalog(self) -> Catalog:
        raise AssertionError("`write` makes it")

    def _locate(self, fragment: Fragment) -> Payload:
        """Where a box is."""
        strides, crc = self._places[fragment.index]
        return Payload(str(self._root / fragment.locator.path), fragment.locator.start, fragment.locator.nbytes, strides, crc)
