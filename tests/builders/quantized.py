"""Sound quantized folders: a sound release whose linear layers are stored as compressed-tensors and DeepSeek store them.

The arithmetic is torch's, written from the formats' descriptions; a test holds it against what compressed-tensors itself wrote
(tests/golden/compressed_tensors).
"""

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tests.builders.editing import Tensors, edit_tensors, set_fields
from tests.builders.megatron_runs import RUNS, write_run
from tests.builders.releases import MODELS, SoundRelease, build_release
from tests.builders.saves import SAVES, save_release

_DYNAMIC = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
LARGEST_E4M3 = 448.0


@dataclass(frozen=True)
class Encoding:
    """How linear layers are stored. `weights` is a config group's; `block` are the rows and columns of one scale, 0 for all."""

    format: str
    weights: dict
    block: tuple[int, int]
    inputs: dict | None = None

    @property
    def is_float(self) -> bool:
        """Whether values are e4m3."""
        return self.weights["type"] == "float"


def _weights(kind: str, bits: int, strategy: str, **more: object) -> dict:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


_FP8 = {**_DYNAMIC, "type": "float"}
_INT8 = {**_DYNAMIC, "type": "int"}
ENCODINGS: dict[str, Encoding] = {
    "fp8_tensor": Encoding("float-quantized", _weights("float", 8, "tensor"), (0, 0), _FP8),
    "fp8_channel": Encoding("float-quantized", _weights("float", 8, "channel"), (1, 0), _FP8),
    "fp8_block": Encoding("float-quantized", _weights("float", 8, "block", block_structure=[16, 8]), (16, 8), _FP8),
    "fp8_naive": Encoding("naive-quantized", _weights("float", 8, "channel"), (1, 0)),
    "fp8_inverse": Encoding("deepseek", _weights("float", 8, "block"), (16, 32)),
    "int8_w8a8": Encoding("int-quantized", _weights("int", 8, "channel"), (1, 0), _INT8),
    "int8_asymmetric": Encoding("int-quantized", _weights("int", 8, "channel", symmetric=False), (1, 0), _INT8),
    "int8_packed": Encoding("pack-quantized", _weights("int", 8, "channel"), (1, 0)),
    "int4_channel": Encoding("pack-quantized", _weights("int", 4, "channel"), (1, 0)),
    "int4_group": Encoding("pack-quantized", _weights("int", 4, "group", group_size=8), (1, 8)),
    "int4_group_asymmetric": Encoding("pack-quantized", _weights("int", 4, "group", group_size=8, symmetric=False), (1, 8)),
    "int3_group_asymmetric": Encoding("pack-quantized", _weights("int", 3, "group", group_size=8, symmetric=False), (1, 8)),
}


# Sound quantized releases that faults are planted into: model, encoding, whether the key-value cache has scales.
QUANTIZED: dict[str, tuple[str, str, bool]] = {
    "dense int4": ("dense", "int4_group_asymmetric", False),
    "dense int8": ("dense", "int8_w8a8", False),
    "dense fp8": ("dense", "fp8_channel", True),
    "moe int4": ("moe", "int4_group", False),
    "router_bias fp8": ("router_bias", "fp8_inverse", False),
}


def build_all(folder: Path) -> dict[str, SoundRelease]:
    """Write every sound release, quantized ones too, below `folder`; by name."""
    sound = {name: build_release(name, folder / name) for name in MODELS}
    for name, (model, encoding, with_cache) in QUANTIZED.items():
        sound[name] = quantize_release(sound[model], encoding, folder / name, with_cache=with_cache)
    for name, (model, _) in SAVES.items():
        sound[name] = save_release(name, folder / f"{name}_save", sound[model])
    for name, (model, _, _) in RUNS.items():
        sound[name] = replace(sound[model], name=name, ranks=write_run(name, folder / f"{name}_save", sound[model].folder))
    return sound


def quantize_release(sound: SoundRelease, encoding: str, folder: Path, *, with_cache: bool = False) -> SoundRelease:
    """Store every projection of a sound release in an encoding; the rest stays as it is."""
    shutil.copytree(sound.folder, folder)
    edit_tensors(folder, lambda held: quantize_linear(held, ENCODINGS[encoding], with_cache=with_cache))
    set_fields(folder / "config.json", quantization_config=quantization_config(ENCODINGS[encoding], sound, with_cache=with_cache))
    return SoundRelease(f"{sound.name}_{encoding}", folder, sound.expected, source=sound.folder)


def is_linear(name: str) -> bool:
    """Whether a weight is quantized: the projections of attention, feed-forward layers and experts."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def quantize_linear(held: Tensors, encoding: Encoding, *, with_cache: bool = False) -> None:
    """Replace every projection by its parts."""
    for name in [name for name in held if is_linear(name)]:
        module = name.removesuffix(".weight")
        parts = quantize_weight(held.pop(name), encoding)
        held.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
        if with_cache and module.endswith("self_attn.o_proj"):
            attention = module.removesuffix(".o_proj")
            held.update({f"{attention}.{letter}_scale": torch.tensor([0.03 + 0.001 * len(module)]) for letter in "kv"})


def quantization_config(encoding: Encoding, sound: SoundRelease, *, with_cache: bool = False) -> dict:
    """Return the config's field, as the quantizer writes it."""
    if encoding.format == "deepseek":
        sizes = list(encoding.block)
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": sizes}
    routers = [name.removesuffix(".weight") for name in sound.expected.shapes if name.endswith("mlp.gate.weight")]
    group = {"targets": ["Linear"], "weights": encoding.weights, "input_activations": encoding.inputs, "format": encoding.format}
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False} if with_cache else None
    return copy.deepcopy(
        {
            **{"quant_method": "compressed-tensors", "format": encoding.format, "quantization_status": "compressed"},
            **{"config_groups": {"group_0": group}, "ignore": ["lm_head", *routers], "kv_cache_scheme": cache},
        }
    )


def quantize_weight(weight: torch.Tensor, encoding: Encoding) -> Tensors:
    """Return the parts of a weight, by suffix. Scales are of the weight's dtype, or fp32 for DeepSeek's."""
    rows, columns = weight.shape
    height, width = encoding.block[0] or rows, encoding.block[1] or columns
    blocks = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = blocks.reshape(-(-rows // height), height, -(-columns // width), width)
    scale, zero = _scale(blocks.amin((1, 3)), blocks.amax((1, 3)), encoding)
    over = [grid.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns] for grid in (scale, zero)]
    values = weight / over[0] + over[1]
    grid = scale.reshape(1) if encoding.block == (0, 0) else scale
    if encoding.is_float:
        stored = values.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale_inv" if encoding.format == "deepseek" else "weight_scale": grid}
    bits = encoding.weights["num_bits"]
    half = 2 ** (bits - 1)
    stored, zero = values.round().clamp(-half, half - 1).to(torch.int8), zero.to(torch.int8)
    zeros = {} if encoding.weights["symmetric"] else {"weight_zero_point": zero}
    if encoding.format != "pack-quantized":
        return {"weight": stored, "weight_scale": grid, **zeros}
    zeros = {name: pack(part.T, bits).T for name, part in zeros.items()}
    return {"weight_packed": pack(stored, bits), "weight_scale": grid, "weight_shape": torch.tensor([rows, columns]), **zeros}


def _scale(low: torch.Tensor, high: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = low.clamp(max=0), high.clamp(min=0)
    largest = torch.maximum(-low, high)
    if encoding.is_float:
        return largest / LARGEST_E4M3, torch.zeros_like(low)
    bits = encoding.weights["num_bits"]
    if encoding.weights["symmetric"]:
        return largest / ((2**bits - 1) / 2), torch.zeros_like(low)
    scale = (high - low) / (2**bits - 1)
    half = 2 ** (bits - 1)
    return scale, (-half - low / scale).clamp(-half, half - 1).round()


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return each row's values as a string of bits, least first, cut into int32 words."""
    numbers = (values.to(torch.int64) + 2 ** (bits - 1)).tolist()
    words = -(-values.shape[1] * bits // 32)
    packed = [sum(number << (bits * at) for at, number in enumerate(row)).to_bytes(4 * words, "little") for row in numbers]
    return torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.int32).reshape(len(numbers), words)
