"""What compressed-tensors is used for: how a release declares its quantization, and its own quantization of the same values.

The library is asked for only when something is quantized. It imports transformers and takes seconds, so it is imported in the functions.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reports.errors import RequestError
from tasks.engine.encodings.encodings import ENCODINGS
from tasks.engine.planning.plan import Quantized

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

_MIXED = "mixed-precision"
# The library's preset for each encoding. Its W8A16 has groups of 128, ours a scale per channel.
_PRESETS: Mapping[str, str] = {"fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "int8-w8a8": "W8A8", "int4": "W4A16"}


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
