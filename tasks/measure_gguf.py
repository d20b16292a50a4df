"""Every tensor of a GGUF file, re-read from disk once: its statistics, and the exact comparison with the second path in the same reading.

What should be stored is made a second time: the second path's values under the published name, the rows of queries and keys permuted as
llama.cpp's converter does it, cast by torch or quantized by the gguf package. Nothing of it is the engine's. A worker holds a band of rows.
"""

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from isal.isal_zlib import crc32

from reports.errors import RequestError
from reports.model import Witness
from tasks.honest_gguf import quantize_by_package
from tasks.measure import hear
from tasks.tally import Tally
from tasks.threads import one_torch_thread
from tasks.witnesses.boxes import read_bytes
from tasks.witnesses.second_path import SecondPath, Target
from validators.gguf_file import BY_NAME, GgufFile, GgufTensor
from validators.gguf_model import Config, forward_of
from validators.gguf_names import ARCHITECTURES, ROPE_FACTORS, published_name, rotated_part
from validators.release import open_release
from validators.tables import GgufTable, TensorTable, format_shape

Bytes = npt.NDArray[np.uint8]
_BAND_NUMEL = 1 << 20
_FLOATS: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FACTOR_ERROR = 1e-5
_ROUNDING = 1 / 12  # mean square of what rounding to whole steps leaves, in steps


@dataclass(frozen=True, slots=True)
class Origin:
    """What a file's tensors are held against: the second path, the model's type and rows per head, and what scales RoPE."""

    witness: SecondPath
    model_type: str
    head_dim: int
    rope_factors: tuple[float, ...] = ()


@dataclass(slots=True)
class _Compared:
    # Units are values, or blocks where the type has them. Sums are over dequantized values.
    units: int = 0
    differing: int = 0
    first: int = -1
    unpermuted: bool = True  # as long as every band is what the source's rows would give unpermuted
    expected_crc32: int = 0
    found_crc32: int = 0
    errors: float = 0.0
    sources: float = 0.0
    steps: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def add(self, found: Bytes, expected: Bytes, unit: int) -> None:
        if not np.array_equal(_words(found), _words(expected)):
            unequal = np.flatnonzero((found.reshape(-1, unit) != expected.reshape(-1, unit)).any(axis=1))
            self.first = self.units + int(unequal[0]) if self.first < 0 else self.first
            self.differing += len(unequal)
        self.units += len(found) // unit
        self.expected_crc32 = crc32(expected.data, self.expected_crc32)


@dataclass(frozen=True, slots=True)
class GgufMeasurement:
    """What one reading gave: a TensorTable, a GgufTable, and whether the source was heard."""

    tensors: pd.DataFrame
    compared: pd.DataFrame
    witness: Witness


def measure_ggufs(folder: Path, plan_path: Path | None, source_roots: tuple[Path, ...], workers: int) -> GgufMeasurement:
    """Read every tensor of a folder's only GGUF file, and hold it against the source where the second path can be heard.

    Args:
        folder: with a config.json that gives the model's type and rows per head.
        plan_path: a plan of the model under its published names, nothing cast; None where there is no source.
        source_roots: the source's folders, the main one first.
        workers: how many tensors are read at the same time.

    Returns:
        The tables, in the file's order. Of several files, the first one's statistics, and nothing is compared.
    """
    release = open_release(folder)
    witness, said = hear(plan_path, source_roots)
    origin = None
    if len(release.ggufs) > 1:
        said = Witness(said.name, False, said.proves, "several GGUF files: judge them one by one")
    elif witness is not None:
        try:
            origin = _origin_of(release.config, witness)
        except RequestError as error:
            said = Witness(said.name, False, said.proves, str(error))
    tensors, compared = measure_gguf(folder, release.ggufs[0], origin, workers)
    return GgufMeasurement(tensors, compared, said)


def _origin_of(config: Config, witness: SecondPath) -> Origin:
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise RequestError(f"model type {kind} is not judged as GGUF; {', '.join(ARCHITECTURES)} are", where="config.json")
    forward = forward_of(config)
    return Origin(witness, kind, forward.head_dim, forward.rope_factors)


def measure_gguf(folder: Path, file: GgufFile, origin: Origin | None, workers: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read every tensor of a file once.

    Args:
        folder: where it lies.
        file: its header.
        origin: what to hold it against; None for statistics alone.
        workers: how many tensors are read at the same time.

    Returns:
        A TensorTable, under the published names where there are any, and a GgufTable, in the file's order. Tensors of a type that is not
        judged, vectors in blocks, those that the file ends before, and those of a name already met are left out.
    """
    intact: dict[str, GgufTensor] = {}
    for tensor in file.tensors:
        is_judged = tensor.nbytes >= 0 and (len(tensor.shape) > 1 or BY_NAME[tensor.type].block == 1)
        if is_judged and tensor.start + tensor.nbytes <= file.nbytes:
            intact.setdefault(published_name(tensor.name) or tensor.name, tensor)
    with one_torch_thread(), ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_measure, folder / file.name, tensor, origin) for tensor in intact.values()]
        rows = [job.result() for job in jobs]
    tensors = pd.DataFrame([statistics for statistics, _ in rows], columns=list(TensorTable.to_schema().columns))
    compared = pd.DataFrame([row for _, row in rows], columns=list(GgufTable.to_schema().columns))
    return TensorTable.validate(tensors), GgufTable.validate(compared)


def _measure(path: Path, tensor: GgufTensor, origin: Origin | None) -> tuple[dict[str, object], dict[str, object]]:
    compared, kind, published = _Compared(), BY_NAME[tensor.type], published_name(tensor.name)
    target = _target(origin.witness, published) if origin else None
    published = target.name if target else published
    row_nbytes = prod(tensor.shape[1:]) // kind.block * kind.nbytes if len(tensor.shape) > 1 else kind.nbytes
    is_rotated = origin is not None and bool(rotated_part(tensor.name)) and ARCHITECTURES[origin.model_type].has_pairs
    unit = origin.head_dim if origin and is_rotated else 1
    factors = origin.rope_factors if origin and tensor.name == ROPE_FACTORS else ()
    wanted = (len(factors),) if factors else target.shape if target else None
    is_comparable = wanted == tensor.shape and (not tensor.shape or tensor.shape[0] % unit == 0)
    with path.open("rb", buffering=0) as stream:
        for first, stop in _bands(tensor, unit):
            found = read_bytes(stream.fileno(), path, tensor.start + first * row_nbytes, (stop - first) * row_nbytes)
            values = _dequantize(found, tensor)
            compared.tally.add(values)
            compared.found_crc32 = crc32(found.numpy().data, compared.found_crc32)
            if origin is not None and is_comparable:
                source = _nearly(factors, values) if factors else _read_source(origin.witness, published, first, stop)
                _compare(compared, found, values, source, tensor, unit)
    return _statistics(path, tensor, compared), _row(tensor, compared, published, is_comparable=is_comparable)


def _target(witness: SecondPath, published: str) -> Target | None:
    # A tied head that is stored all the same must be the embedding.
    found = witness.targets.get(published)
    return witness.targets.get(_EMBEDDING) if found is None and published == _HEAD else found


def _bands(tensor: GgufTensor, unit: int) -> Iterator[tuple[int, int]]:
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _BAND_NUMEL // max(1, prod(tensor.shape[1:])) // unit) * unit
    return ((at, min(rows, at + step)) for at in range(0, rows, step))


def _dequantize(found: torch.Tensor, tensor: GgufTensor) -> torch.Tensor:
    # (values,) fp32.
    if tensor.type in _FLOATS:
        return found.view(_FLOATS[tensor.type]).to(torch.float32)
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(found.numpy(), gguf.GGMLQuantizationType[tensor.type]))


def _encode(values: torch.Tensor, tensor: GgufTensor) -> Bytes:
    if tensor.type in _FLOATS:
        return values.to(_FLOATS[tensor.type]).contiguous().view(-1).view(torch.uint8).numpy()
    return quantize_by_package(values, tensor.type).reshape(-1)


def _read_source(witness: SecondPath, published: str, first: int, stop: int) -> torch.Tensor:
    target, band = witness.targets[published], None
    for piece in witness.pieces(published, _BAND_NUMEL, rows=(first, stop)):
        if band is None:
            band = torch.empty((stop - first, *target.shape[1:]), dtype=piece.values.dtype)
        offset = (piece.box.offset[0] - first, *piece.box.offset[1:])
        band[tuple(slice(o, o + n) for o, n in zip(offset, piece.box.shape, strict=True))] = piece.values
    assert band is not None
    return band


def _nearly(factors: tuple[float, ...], values: torch.Tensor) -> torch.Tensor:
    # Writers compute them in fp32, each in its own order of operations.
    exact = torch.tensor(factors, dtype=torch.float32)
    return torch.where(torch.isclose(values, exact, rtol=_FACTOR_ERROR, atol=0), values, exact)


def _compare(compared: _Compared, found: torch.Tensor, values: torch.Tensor, source: torch.Tensor, tensor: GgufTensor, unit: int) -> None:
    permuted = _permute(source, unit) if unit > 1 else source
    raw, kind = found.numpy(), BY_NAME[tensor.type]
    compared.add(raw, _encode(permuted, tensor), kind.nbytes)
    if compared.differing and compared.unpermuted:
        compared.unpermuted = unit > 1 and np.array_equal(raw, _encode(source, tensor))
    origin = permuted.to(torch.float32).reshape(-1)
    compared.sources += _squares(origin)
    compared.errors += _squares(values.view(-1) - origin)
    if kind.block > 1:
        scales = found.view(-1, kind.nbytes)[:, :2].contiguous().view(torch.float16).to(torch.float64)
        compared.steps += float((scales * scales).nansum()) * kind.block


def _squares(values: torch.Tensor) -> float:
    return float(torch.dot(values, values))  # of a band: five digits, and no copy in fp64


def _words(raw: Bytes) -> npt.NDArray[np.unsignedinteger]:
    return raw.view(np.uint64) if len(raw) % 8 == 0 else raw


def _permute(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    # Source: llama.cpp convert_hf_to_gguf.py, LlamaModel.permute.
    heads = rows.shape[0] // head_dim
    return rows.reshape(heads, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _statistics(path: Path, tensor: GgufTensor, compared: _Compared) -> dict[str, object]:
    return {
        "name": published_name(tensor.name) or tensor.name,
        "file": path.name,
        "dtype": tensor.type,
        "shape": format_shape(tensor.shape),
        "nbytes": tensor.nbytes,
        **compared.tally.as_columns(),
        "relative_error": _ratio(compared.errors, compared.sources) if compared.units else math.nan,
        "sample": "",
        "repeated": "",
    }


def _row(tensor: GgufTensor, compared: _Compared, published: str, *, is_comparable: bool) -> dict[str, object]:
    return {
        "name": tensor.name,
        "published": published,
        "type": tensor.type,
        "compared": int(is_comparable),
        "units": compared.units,
        "differing": compared.differing,
        "first": compared.first,
        "unpermuted": int(compared.differing > 0 and compared.unpermuted),
        "relative_error": _ratio(compared.errors, compared.sources) if is_comparable else math.nan,
        "rounding": _ratio(compared.steps * _ROUNDING, compared.sources) if is_comparable else math.nan,
        "expected_crc32": compared.expected_crc32 if is_comparable else -1,
        "found_crc32": compared.found_crc32,
    }


def _ratio(squares: float, sources: float) -> float:
    if sources == 0:
        return 0.0 if squares == 0 else math.inf
    return math.sqrt(squares / sources)
