"""A DCP save of very many chunks, without its values: the metadata by torch's own classes, the data files as holes of the right size."""

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, COLUMNS, ITEM_NBYTES = 4, 4096, 34_000


def write_large(folder: Path, tensors: int, ranks: int) -> None:
    """Write a save of `tensors` bf16 tensors, each in `ranks` chunks of rows."""
    folder.mkdir(parents=True)
    items, paths, places = {}, {}, {}
    for number in range(tensors):
        fqn = f"model.layers.{number // 10}.block{number % 10}.weight"
        key = f"model.{fqn}"
        chunks = [ChunkStorageMetadata(torch.Size([rank * ROWS, 0]), torch.Size([ROWS, COLUMNS])) for rank in range(ranks)]
        items[key] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([ROWS * ranks, COLUMNS]), chunks)
        paths[key] = ("model", fqn)
        for rank, chunk in enumerate(chunks):
            places[MetadataIndex(key, chunk.offsets, rank)] = _StorageInfo(f"__{rank}_0.distcp", number * ITEM_NBYTES, ITEM_NBYTES)
    for rank in range(ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(tensors * ITEM_NBYTES)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(items, paths, places, StorageMeta(), "1.0.0"), file)
