"""Witness *framework*: torch's own loader fills transformers' own model, which is then held against the release as transformers loads it.

It proves bytes and mapping, for DCP sources that hold transformers' live names (under a top key such as "model", or at the root). Torch's
loader runs `.metadata` as a pickle, so it gets the very bytes that the closed list has accepted; of the items it is asked for tensors
only, which it loads with `weights_only=True`. It needs two fp32 copies of the model in memory.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pandas as pd
import torch

from reports.errors import name_some
from tasks.quiet import Talk, quiet
from tasks.tally import Difference, Scratch, Tally
from tasks.witnesses.dcp_metadata import DcpTensor, read_dcp_metadata
from tasks.witnesses.hearing import NotHeardError
from tasks.witnesses.sources import find_dcp_folder, model_name
from validators.tables import ValueTable

NAME = "framework"
_LOADING = {"local_files_only": True, "trust_remote_code": False}
_DETERMINISTIC = {"attn_implementation": "eager", "experts_implementation": "eager"}
_LOSSLESS = frozenset({"float32", "bfloat16", "float16"})  # dtypes that fp32 holds exactly
_PIECE_NUMEL = 1 << 19


class _Output(Protocol):
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]


class _LiveModel(Protocol):
    all_tied_weights_keys: dict[str, str]

    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool, output_hidden_states: bool) -> _Output: ...
    def state_dict(self) -> dict[str, torch.Tensor]: ...
    def eval(self) -> "_LiveModel": ...


@dataclass(frozen=True, slots=True)
class _Copies:
    # A second copy that the source holds of a tied tensor, beside the one the model took.
    name: str
    values: torch.Tensor


class Framework:
    """The witness: a live fp32 model with the source's values.

    Args:
        source_format: as the plan names it.
        roots: the source's folders, the main one first.
        config_folder: holds config.json.
        memory_limit: bytes that two fp32 copies of the model may take.

    Raises:
        NotHeardError: the reason why it has nothing to say.
        FormatError: the `.metadata` is damaged or hostile.
    """

    def __init__(self, source_format: str, roots: tuple[Path, ...], config_folder: Path, memory_limit: int) -> None:
        if source_format != "dcp":
            raise NotHeardError(f"torch's own loader reads DCP checkpoints, this one is {source_format!r}")
        folder = find_dcp_folder(roots[0])
        content = (folder / ".metadata").read_bytes()
        listed = {model_name(tensor): tensor for tensor in read_dcp_metadata(content)}
        _refuse_split(folder, listed)
        shapes, aliases = _describe_live(config_folder)
        _refuse_other_names({name: shape for name, shape in shapes.items() if name in listed or name not in aliases}, listed)
        needed = 2 * 4 * sum(map(prod, shapes.values()))
        if needed > memory_limit:
            raise NotHeardError(f"two fp32 copies need {needed:,} bytes, the limit is {memory_limit:,}")
        self._model = _build(config_folder)
        self._copies = _fill(self._model, folder, content, listed)

    def run(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run one batch through the live model.

        Args:
            input_ids: (B, S) int64.

        Returns:
            Logits (B, S, V) fp32, and the hidden states (B, S, H), the embeddings' output first.
        """
        with torch.inference_mode():
            out = self._model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        return out.logits.float(), tuple(out.hidden_states)

    def compare_parameters(self, release: Path, release_dtype: torch.dtype) -> pd.DataFrame:
        """Hold every live parameter, after the cast, against what transformers makes of the release.

        Args:
            release: the folder.
            release_dtype: what the release's floats were cast to; a parameter that kept its source's values is right as well.

        Returns:
            A ValueTable, one row per live parameter or buffer, in the model's order; second copies of tied tensors are held against the
            first.

        Raises:
            NotHeardError: transformers does not load the release.
        """
        released = _load_release(release)
        live = self._model.state_dict()
        if live.keys() != released.keys():
            raise NotHeardError(f"the release loads with other parameters: {name_some(live.keys() ^ released.keys())}")
        rows = [_compare(name, values, released[name], release_dtype) for name, values in live.items()]
        rows += [_compare(copy.name, copy.values, live[copy.name], torch.float32) for copy in self._copies]
        return ValueTable.validate(pd.DataFrame(rows, columns=list(ValueTable.to_schema().columns)))


def _refuse_split(folder: Path, listed: Mapping[str, DcpTensor]) -> None:
    files = {place.path for tensor in listed.values() for place in tensor.places}
    absent = sorted(name for name in files if not (folder / name).is_file())
    if absent:
        raise NotHeardError(f"torch's loader reads one folder, and {name_some(absent)} are not in it", where=str(folder))


def _describe_live(config_folder: Path) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    # Shapes by live name, and the names that are second names of a tied tensor.
    with torch.device("meta"):
        model = _from_config(config_folder)
    return {name: tuple(values.shape) for name, values in model.state_dict().items()}, frozenset(model.all_tied_weights_keys)


def _refuse_other_names(shapes: Mapping[str, tuple[int, ...]], listed: Mapping[str, DcpTensor]) -> None:
    missing = sorted(shapes.keys() - listed.keys())
    if missing:
        raise NotHeardError(f"the source does not have transformers' own names: {name_some(missing)} absent")
    wrong = sorted(name for name in shapes if listed[name].shape != shapes[name])
    if wrong:
        raise NotHeardError(f"shapes differ from the config's model: {name_some(wrong)}")
    lossy = sorted(name for name in shapes if "float" in listed[name].dtype and listed[name].dtype not in _LOSSLESS)
    if lossy:
        raise NotHeardError(f"fp32 cannot hold the source's values of {name_some(lossy)}")


def _from_config(config_folder: Path) -> _LiveModel:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as talk

    try:
        with quiet(cast("Talk", talk)):
            config = AutoConfig.from_pretrained(config_folder, **_LOADING)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False, **_DETERMINISTIC)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError) as error:
        raise NotHeardError(f"transformers does not build this config's model: {error}") from None
    return cast("_LiveModel", model)


def _build(config_folder: Path) -> _LiveModel:
    return _from_config(config_folder).eval()


def _fill(model: _LiveModel, folder: Path, content: bytes, listed: Mapping[str, DcpTensor]) -> tuple[_Copies, ...]:
    # Two live names of one storage are a tied pair: the second one's values are loaded beside it, to be compared.
    wanted: dict[str, torch.Tensor] = {}
    copies, seen = [], set()
    for name, values in model.state_dict().items():
        if values.data_ptr() in seen and name in listed:
            copies.append(_Copies(name, torch.empty_like(values)))
            wanted[listed[name].key] = copies[-1].values
        elif values.data_ptr() not in seen:
            wanted[listed[name].key] = values.detach()
            seen.add(values.data_ptr())
    _load(folder, content, wanted)
    return tuple(copies)


def _load(folder: Path, content: bytes, wanted: dict[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.state_dict_loader import load

    class AcceptedReader(FileSystemReader):
        def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
            metadata = cast("Metadata", pickle.loads(content))  # accepted by the closed list
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that one process loads alone
        load(wanted, storage_reader=AcceptedReader(folder), no_dist=True)


def _load_release(release: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as talk

    try:
        with quiet(cast("Talk", talk)):
            model, loading = AutoModelForCausalLM.from_pretrained(
                release, dtype=torch.float32, output_loading_info=True, **_LOADING, **_DETERMINISTIC
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise NotHeardError(f"transformers does not load the release: {error}") from None
    if loading["missing_keys"] or loading["mismatched_keys"]:
        raise NotHeardError(f"transformers finds no values in the release for {name_some(map(str, loading['missing_keys']))}")
    return dict(cast("_LiveModel", model).state_dict())


def _compare(name: str, live: torch.Tensor, released: torch.Tensor, dtype: torch.dtype) -> dict[str, object]:
    scratch = Scratch()
    tally, difference = Tally(scratch), Difference(scratch)
    kept = live.shape == released.shape and torch.equal(live, released)
    for start, stop in _pieces(live.numel()):
        found = released.reshape(-1)[start:stop].contiguous()
        source = live.reshape(-1)[start:stop]
        cast_source = source if kept or not source.is_floating_point() else source.to(dtype).to(source.dtype)
        squares = tally.add(found)
        difference.add(found, cast_source, squares, partial(np.arange, start, stop, dtype=np.int64))
    return difference.as_row(name, NAME)


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(numel, start + _PIECE_NUMEL)) for start in range(0, numel, _PIECE_NUMEL))
