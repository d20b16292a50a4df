"""What compressed-tensors is used for: how a release declares its quantization, and its own quantization of the same values.

The second is what a sound quantization costs, as `honest_cast` is for casts: it shares nothing with the engine but names. The library is
asked for only when something is quantized. It imports transformers and takes seconds, so it is imported in the functions.
"""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from reports.errors import RequestError
from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.planning.plan import Quantized
from tasks.measure import DTYPES
from validators.release import INDEX_NAME, open_release

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

_MIXED = "mixed-precision"
# The library's preset for each encoding. Its W8A16 has groups of 128, ours a scale per channel.
_PRESETS: Mapping[str, str] = {"fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "int8-w8a8": "W8A8", "int4": "W4A16"}
_FUSED_EXPERTS = frozenset({"fp8", "int8", "int4"})
_PASSES_WHOLE = "fp8"


def refuse_absent() -> None:
    """Raise where compressed-tensors is not installed.

    Raises:
        RequestError: it is not; the remedy is the command that installs it.
    """
    if find_spec("compressed_tensors") is None:
        raise RequestError(
            "needs the package compressed-tensors, which is not installed",
            where="--quantize",
            remedy="Install it: pip install 'compressed-tensors>=0.20.1' (or shardwright's extra: pip install -e '.[quantize]').",
        )


def quantization_config(quantized: Quantized) -> Mapping[str, object]:
    """Return config.json's quantization_config, as compressed-tensors writes it.

    Args:
        quantized: at least one group.

    Returns:
        JSON values.
    """
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    formats = {ENCODINGS[group.encoding].scheme.format for group in quantized.groups}
    config = QuantizationConfig(
        config_groups={f"group_{at}": scheme_of(group.encoding, group.targets) for at, group in enumerate(quantized.groups)},
        format=formats.pop() if len(formats) == 1 else _MIXED,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(quantized.ignore),
    )
    return {"version": compressed_tensors.__version__, "sparsity_config": {}, "transform_config": {}, **config.model_dump(mode="json")}


def why_unloadable(encodings: Collection[str], experts: Collection[str]) -> str:
    """Say why transformers does not load a release: it fuses the experts of a layer, and dequantizes them by one scheme while it does.

    Args:
        encodings: of the whole release.
        experts: those of its routed experts' weights, "" for weights that are whole; none of a dense model.

    Returns:
        The reason; empty where nothing is known against it. Source: transformers 5.24, integrations/compressed_tensors.py.
    """
    quantized = sorted({*experts} - {""})
    if len(quantized) > 1:
        ways = ", others as ".join(quantized)
        return f"transformers does not load experts of which some are stored as {ways}: it takes all for one scheme's"
    if "" in experts and {*encodings} != {_PASSES_WHOLE}:
        return f"transformers does not load experts that are whole in a release that quantizes anything as else than {_PASSES_WHOLE}"
    lost = [encoding for encoding in quantized if encoding not in _FUSED_EXPERTS]
    return f"transformers does not load experts stored as {lost[0]}: it fuses them, and only those of fp8 and packed ones" if lost else ""


def scheme_of(encoding: str, targets: Sequence[str]) -> "QuantizationScheme":
    """Return an encoding in compressed-tensors' words.

    Args:
        encoding: a key of ENCODINGS.
        targets: the modules that are stored so.

    Returns:
        The library's scheme.
    """
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme

    preset = _PRESETS.get(encoding)
    scheme = (
        preset_name_to_scheme(preset, list(targets))
        if preset is not None
        else QuantizationScheme(targets=list(targets), weights=QuantizationArgs(num_bits=8, strategy="channel", symmetric=True))
    )
    scheme.format = ENCODINGS[encoding].scheme.format
    return scheme


def scheme_bits(encoding: str) -> tuple[str, int]:
    """Return an encoding's kind and bits.

    Args:
        encoding: a key of ENCODINGS.

    Returns:
        Such as ("int", 4).
    """
    scheme = ENCODINGS[encoding].scheme
    return scheme.kind, scheme.bits


def write_honest_quantization(merged: Path, release: Path, encodings: Mapping[str, str], folder: Path) -> Path:
    """Write the merged values quantized by compressed-tensors itself.

    Args:
        merged: the values before any cast; one of its files at a time is held in memory, quantized.
        release: names the dtypes, and holds the config; its values are not read.
        encodings: by weight; other tensors are cast to the dtype the release stores them in.
        folder: where to; made.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True)
    dtypes = {tensor.name: tensor.dtype for tensor in open_release(release).stored()}
    weight_map: dict[str, str] = {}
    for file in open_release(merged).files:
        held: dict[str, torch.Tensor] = {}
        with safe_open(merged / file.name, "pt") as source:
            for name in source.keys():  # noqa: SIM118  (no mapping)
                held |= _stored_by_library(name, source.get_tensor(name), encodings.get(name, ""), dtypes)
        save_file(held, folder / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file.name)
    if len(set(weight_map.values())) > 1:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    shutil.copyfile(release / "config.json", folder / "config.json")
    return folder


def _stored_by_library(name: str, values: torch.Tensor, encoding: str, dtypes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    if not encoding:
        return {name: values.to(DTYPES[dtypes[name]])}
    module = name.removesuffix(".weight")
    parts = compress(values.to(DTYPES[dtypes[f"{module}.weight_scale"]]), encoding)
    return {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}


def compress(values: torch.Tensor, encoding: str) -> dict[str, torch.Tensor]:
    """Return the parts that compressed-tensors makes of a weight, rounding to nearest.

    Args:
        values: (N, K), any float dtype; scales have the same.
        encoding: a key of ENCODINGS that can hold it.

    Returns:
        Parts by suffix.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = scheme_of(encoding, ("Linear",))
    rows, columns = ENCODINGS[encoding].scheme.block
    blocks = values.reshape(values.shape[0] // rows, rows, -1, columns or values.shape[1])
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
    parts = {"weight": values, "weight_scale": scales, "weight_zero_point": zeros}
    made: dict[str, torch.Tensor] = BaseCompressor.get_value_from_registry(scheme.format).compress(parts, scheme)
    return made
