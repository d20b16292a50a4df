"""Torch's own DCP loader, given only bytes that the closed list has accepted.

`.metadata` is read once, accepted, and those very bytes are unpickled. Tensors are loaded with `weights_only=True` by torch itself. An
object's bytes are read once, accepted at every depth, and handed over from memory.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py (`FileSystemReader`) and default_planner.py (`load_bytes`).
"""

import io
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from tasks.engine.containers.ranges import read_range, read_whole
from tasks.engine.containers.state_pickle import read_state
from tasks.engine.formats.dcp_metadata import DcpMetadata


class AcceptedReader(FileSystemReader):
    """Reads one DCP folder for `dcp.load`.

    Args:
        folder: the folder of `.metadata`.

    Raises:
        HostilePickleError: the metadata asks for a global outside the closed list.
        FormatError: it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._content = read_whole(folder / ".metadata")
        self.accepted = DcpMetadata(self._content, str(folder / ".metadata"))

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """Return the metadata.

        Args:
            *_args: of torch's own; not needed.
            **_kwargs: the same.

        Returns:
            Torch's object of the accepted bytes.
        """
        metadata = cast("Metadata", pickle.loads(self._content))  # accepted by the closed list
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what a plan asks for.

        Args:
            plan: torch's.
            planner: torch's.

        Returns:
            A future that is done.

        Raises:
            HostilePickleError: an object asks for a global outside the closed list.
        """
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        for item in objects:
            planner.load_bytes(item, io.BytesIO(self._accept(item.storage_index.fqn)))
        return super().read_data(replace(plan, items=[item for item in plan.items if item.type != LoadItemType.BYTE_IO]), planner)

    def _accept(self, key: str) -> bytes:
        place = self.accepted.place(key, None)
        path = str(self._folder / place.path)
        content = read_range(path, place.start, place.nbytes)
        with tempfile.NamedTemporaryFile() as copy:  # archives are read from files: what is accepted is what is handed over
            copy.write(content)
            copy.flush()
            read_state(copy.name, 0, len(content))
        return content
