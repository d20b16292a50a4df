"""Planted faults of files, headers and index, and of names. Numbers in comments are rows of the public catalogue of faults."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.builders.editing import INDEX, Tensors, edit_header, edit_json, edit_tensors, first_file, set_fields
from tests.faults.planting import Fault

LAYER = "model.layers.1."
QROW = b'"model.layers.0.self_attn.q_proj.weight":'


def remove_weights(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()


def overwrite_header_length(folder: Path) -> None:
    raw = first_file(folder).read_bytes()
    first_file(folder).write_bytes(b"\xff" * 8 + raw[8:])


def truncate(folder: Path) -> None:
    path = first_file(folder)
    path.write_bytes(path.read_bytes()[:-300])


def append(folder: Path) -> None:
    path = first_file(folder)
    path.write_bytes(path.read_bytes() + b"\0" * 16)


def open_hole(folder: Path) -> None:
    def shift(header: dict) -> None:
        last = max((entry for name, entry in header.items() if name != "__metadata__"), key=lambda entry: entry["data_offsets"])
        last["data_offsets"] = [offset + 8 for offset in last["data_offsets"]]

    edit_header(first_file(folder), shift)
    append(folder)


def overlap(folder: Path) -> None:
    def point_at_other(header: dict) -> None:
        names = [name for name in header if name.endswith("layernorm.weight")]
        header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]

    edit_header(first_file(folder), point_at_other)


def change_entry(**fields: object):
    def plant(folder: Path) -> None:
        edit_header(first_file(folder), lambda header: header["model.layers.0.self_attn.q_proj.weight"].update(fields))

    return plant


def drop_format(folder: Path) -> None:
    edit_header(first_file(folder), lambda header: header.pop("__metadata__"))


def set_metadata(header: dict) -> None:
    header["__metadata__"] = {"format": "pt", "step": 7}


def copy_tensor_to_last_file(folder: Path) -> None:
    last = max(folder.glob("*.safetensors"))
    tensors = load_file(first_file(folder))
    name = min(tensors)
    save_file({**load_file(last), name: tensors[name]}, last, metadata={"format": "pt"})


def delete_shard(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


def list_in_wrong_shard(folder: Path) -> None:
    def move(index: dict) -> None:
        names = index["weight_map"]
        names["model.norm.weight"] = next(file for file in sorted(names.values()) if file != names["model.norm.weight"])

    edit_json(folder / INDEX, move)


def keep_stale_index(folder: Path) -> None:
    def rename(index: dict) -> None:
        index["weight_map"] = {name: file.replace("-of-00004", "-of-00030") for name, file in index["weight_map"].items()}

    edit_json(folder / INDEX, rename)


def repeat_key(old: bytes, new: bytes):
    def plant(folder: Path) -> None:
        raw = first_file(folder).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + length].replace(old, new, 1)
        first_file(folder).write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])

    return plant


def repeat_field(name: str, field: str, value: object):
    def plant(folder: Path) -> None:
        text, key = (folder / name).read_text(), f'"{field}":'
        assert key in text
        (folder / name).write_text(text.replace(key, f"{key} {json.dumps(value)}, {key}", 1))

    return plant


def drop(*parts: str):
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return lambda folder: edit_tensors(folder, change)


def add(name: str, tensor: torch.Tensor):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: tensor}))


def rename(old: str, new: str):
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return lambda folder: edit_tensors(folder, change)


def add_random_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.3." in name]:
        tensors[name.replace(".layers.3.", ".layers.4.")] = 0.02 * torch.randn_like(tensors[name])


def leave_adapter_unmerged(tensors: Tensors) -> None:
    name = f"{LAYER}self_attn.q_proj"
    tensors[f"{name}.base_layer.weight"] = tensors.pop(f"{name}.weight")
    tensors[f"{name}.lora_A.default.weight"] = torch.randn(4, 64)
    tensors[f"{name}.lora_B.default.weight"] = torch.randn(64, 4)


def fuse_experts(tensors: Tensors) -> None:
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up = [torch.cat([tensors.pop(f"{prefix}{e}.gate_proj.weight"), tensors.pop(f"{prefix}{e}.up_proj.weight")]) for e in range(4)]
        down = [tensors.pop(f"{prefix}{e}.down_proj.weight") for e in range(4)]
        tensors[f"{prefix}gate_up_proj"], tensors[f"{prefix}down_proj"] = torch.stack(gate_up), torch.stack(down)


def replace_config_by_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


FAULTS = (
    Fault("config_absent", "dense", "config.absent", lambda folder: (folder / "config.json").unlink()),
    Fault("config_is_a_folder", "dense", "config.absent", replace_config_by_folder),
    Fault("weights_absent", "dense", "files.none", remove_weights),
    Fault("header_garbage", "dense", "files.malformed", overwrite_header_length),
    Fault("index_not_json", "dense", "files.malformed", lambda folder: (folder / INDEX).write_text("{")),
    Fault("config_not_json", "dense", "files.malformed", lambda folder: (folder / "config.json").write_text("[1")),
    Fault("zero_length_shard", "dense", "files.zero-length", lambda folder: first_file(folder).write_bytes(b"")),  # 88
    Fault("truncated_shard", "dense", "files.truncated", truncate),  # 51, 52
    Fault("trailing_bytes", "dense", "files.trailing-bytes", append),  # 53
    Fault("offsets_leave_hole", "dense", "files.hole", open_hole),  # 54
    Fault("offsets_overlap", "dense", "files.overlap", overlap),  # 54
    Fault("shape_larger_than_bytes", "dense", "files.size-mismatch", change_entry(shape=[64, 65])),  # 54
    Fault("dtype_unheard_of", "dense", "files.unknown-dtype", change_entry(dtype="F7")),
    Fault("metadata_no_format", "dense", "files.no-format", drop_format),  # 55
    Fault("metadata_of_numbers", "dense", "files.malformed", lambda folder: edit_header(first_file(folder), set_metadata)),
    Fault("shape_beyond_any_file", "dense", "files.malformed", change_entry(shape=[2**40, 2**40])),
    Fault("header_nested_without_end", "dense", "files.malformed", repeat_key(b'{"', b'{"x":' + b"[" * 100_000 + b',"')),
    Fault("tensor_twice_in_header", "dense", "files.duplicate-key", repeat_key(QROW, QROW + b"{}," + QROW)),
    Fault(
        "offsets_twice_in_header", "dense", "files.duplicate-key", repeat_key(b'"data_offsets":', b'"data_offsets":[0,4],"data_offsets":')
    ),
    Fault("config_field_twice", "dense", "files.duplicate-key", repeat_field("config.json", "num_hidden_layers", 3)),
    Fault(
        "index_entry_twice", "dense", "files.duplicate-key", repeat_field(INDEX, "model.norm.weight", "model-00001-of-00004.safetensors")
    ),
    Fault("zero3_stub", "tied", "files.empty-tensor", add("model.norm.weight", torch.empty(0))),  # 57
    Fault("name_in_two_files", "dense", "files.name-in-two-files", copy_tensor_to_last_file),
    Fault("index_without_map", "dense", "files.index-invalid", lambda folder: set_fields(folder / INDEX, weight_map=None)),
    Fault("index_lost", "dense", "files.index-missing", lambda folder: (folder / INDEX).unlink()),
    Fault("shard_missing", "dense", "files.index-shard-missing", delete_shard),  # 49
    Fault("stale_index", "dense", "files.index-shard-missing", keep_stale_index),  # 50
    Fault("index_wrong_shard", "dense", "files.index-wrong-shard", list_in_wrong_shard),  # 48
    Fault(
        "index_unlisted",
        "dense",
        "files.index-unlisted",
        lambda folder: edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight")),
    ),
    Fault("total_size_wrong", "dense", "files.total-size", lambda folder: set_fields(folder / INDEX, metadata={"total_size": 1})),
    Fault(
        "stray_consolidated",
        "dense",
        "files.stray-weights",
        lambda folder: shutil.copy(first_file(folder), folder / "consolidated.safetensors"),
    ),  # 56
    Fault(
        "stale_single_file", "dense", "files.stray-weights", lambda folder: shutil.copy(first_file(folder), folder / "model.safetensors")
    ),  # 56
    Fault("tensor_missing", "dense", "inventory.missing", drop(f"{LAYER}mlp.up_proj")),
    Fault("last_layer_lost", "dense", "inventory.missing", drop(".layers.3.")),  # 22
    Fault("extra_random_layer", "dense", "inventory.unexpected", lambda folder: edit_tensors(folder, add_random_layer)),
    Fault("name_twice", "dense", "inventory.twice", copy_tensor_to_last_file),
    Fault("prefix_orig_mod", "dense", "inventory.wrapper-prefix", rename("model.layers.0", "_orig_mod.model.layers.0")),  # 58
    Fault("prefix_module", "dense", "inventory.wrapper-prefix", rename("model.", "module.module.model.")),  # 58
    Fault("prefix_inside", "dense", "inventory.wrapper-prefix", rename(".mlp.", "._checkpoint_wrapped_module.mlp.")),  # 58
    Fault("lora_unmerged", "dense", "inventory.lora-leftover", lambda folder: edit_tensors(folder, leave_adapter_unmerged)),  # 60
    Fault("buffer_saved", "dense", "inventory.saved-buffer", add(f"{LAYER}self_attn.rotary_emb.inv_freq", torch.rand(4))),  # 44
    Fault("experts_under_live_names", "moe", "inventory.fused-experts", lambda folder: edit_tensors(folder, fuse_experts)),  # 25
)
