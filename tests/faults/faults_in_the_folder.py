"""Planted faults of what lies in the folder beside weights and index: strays, manifest and marker, credentials and paths."""

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests.builders.editing import edit_header, edit_json, edit_tensors, first_file, set_fields, write_json
from tests.faults.planting import Fault

MANIFEST, MARKER = "shardwright.json", "shardwright.committed"
# Made up, in the issuers' forms; cut in two so that no scanner takes this file for a leak.
HF = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmPoIuYtRe"
PEM = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gt\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"
CREDENTIALS = {
    "hugging_face": HF,
    "openai": "sk-" + "proj-a8Kd03jfLq92mZpX7cVb4TyR1wEs",
    "github": "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a",
    "aws": "AKIA" + "Q3EGZ7LTN2WXVB5R",
    "private_key": PEM,
    "url": "https://ci-bot:" + "tr0ub4dor-77@git.acme.test/llm.git",
}


def sign(folder: Path) -> None:
    """Write the manifest and the marker that an export writes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    entries = {path.name: {"nbytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in files}
    write_json(folder / MANIFEST, {"schema": "shardwright.manifest/1", "files": entries})
    commit(folder)


def commit(folder: Path) -> None:
    """Write the marker for the manifest as it is."""
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    (folder / MARKER).write_text(json.dumps({"manifest_sha256": digest}) + "\n")


def signed(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a planter that signs the folder and changes it afterwards."""

    def plant(folder: Path) -> None:
        sign(folder)
        change(folder)

    return plant


def flip_bit(folder: Path) -> None:
    path = first_file(folder)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def append_space(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + " ")


def list_short(folder: Path) -> None:
    edit_json(folder / MANIFEST, lambda manifest: manifest["files"][first_file(folder).name].update(nbytes=7))
    commit(folder)


def write(name: str, text: str) -> Callable[[Path], None]:
    """Return a planter that writes a file, with the folders above it."""

    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return plant


def put(name: str, raw: bytes = b"\0\1") -> Callable[[Path], None]:
    """Return a planter that writes a file's bytes."""

    def plant(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)

    return plant


def saved(*, zipped: bool) -> bytes:
    """Return what torch.save writes."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def link_out(name: str) -> Callable[[Path], None]:
    """Return a planter that moves a file out of the folder and links to it."""

    def plant(folder: Path) -> None:
        moved = (folder / name).rename(folder.parent / f"moved-{name}")
        (folder / name).symlink_to(moved)

    return plant


def name_code(*references: object, file: str = "config.json") -> Callable[[Path], None]:
    """Return a planter that names code in an auto_map and puts a module beside it."""

    def plant(folder: Path) -> None:
        set_fields(folder / file, auto_map={f"Auto{index}": reference for index, reference in enumerate(references)})
        (folder / "modeling_own.py").write_text("class Own: ...\n")

    return plant


def header_metadata(**fields: str) -> Callable[[Path], None]:
    """Return a planter that adds to the metadata of the first weight file."""
    return lambda folder: edit_header(first_file(folder), lambda header: header["__metadata__"].update(fields))


STRAYS = (
    Fault("pickle_payload", "dense", "files.pickle", put("pytorch_model.bin", saved(zipped=True))),  # 61
    Fault("pickle_in_a_folder", "dense", "files.pickle", put("original/consolidated.00.PTH")),  # 61
    Fault("pickle_under_another_name", "dense", "files.pickle", put("vocab.dat", pickle.dumps({"a": 1}))),
    Fault("torch_zip_under_another_name", "dense", "files.pickle", put("weights.dat", saved(zipped=True))),
    Fault("torch_legacy_under_another_name", "dense", "files.pickle", put("weights", saved(zipped=False))),
    Fault("shared_library", "dense", "files.executable", put("libattn.so.1")),
    Fault("elf_under_another_name", "dense", "files.executable", put("run", b"\x7fELF\2\1\1" + bytes(40))),
    Fault("windows_program_under_another_name", "dense", "files.executable", put("setup.dat", b"MZ\x90\0" + bytes(60))),
    Fault("shell_script", "dense", "files.script", write("serve.sh", "python -m http.server\n")),
    Fault("script_under_another_name", "dense", "files.script", write("convert", "#!/usr/bin/env python3\n")),
    Fault("code_that_nothing_names", "dense", "files.script", write("modeling_own.py", "class Own: ...\n")),
    Fault("code_named_by_config", "dense", "files.remote-code", name_code("modeling_own.Own")),
    Fault("code_of_another_repository", "dense", "files.remote-code", name_code("someone/else--modeling.Own")),
    Fault("code_named_by_tokenizer", "dense", "files.remote-code", name_code(["own.Own", None], file="tokenizer_config.json")),
    Fault("half_written_shard", "dense", "files.half-written", put("model-00001-of-00004.safetensors.tmp")),  # 88
    Fault("interrupted_download", "dense", "files.half-written", put("tokenizer.model.incomplete")),
    Fault("stage_left", "dense", "files.half-written", write(".progress/model.safetensors.json", "{}")),
    Fault("stage_inside", "dense", "files.half-written", write(".out.shardwright-0123456789abcdef/config.json", "{}")),
    Fault("adapter_config_left", "dense", "files.adapter", write("adapter_config.json", '{"peft_type": "LORA"}')),  # 60
    Fault("adapter_weights_left", "dense", "files.adapter", put("adapter_model.bin")),  # 60
    Fault(
        "lora_in_unknown_model",
        "dense",
        "files.adapter-tensor",
        lambda folder: edit_tensors(
            folder, lambda held: held.update({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.randn(4, 64)})
        ),
        amend=lambda evidence: replace(evidence, expected=None),
    ),  # 60
    Fault("optimizer_left", "dense", "files.training-state", put("optimizer.pt")),
    Fault("trainer_state_left", "dense", "files.training-state", write("trainer_state.json", "{}")),
    Fault("rng_left", "dense", "files.training-state", put("rng_state_3.pth")),
    Fault("zero_states_left", "dense", "files.training-state", put("global_step7/mp_rank_00_model_states.pt")),
    Fault("dcp_left", "dense", "files.training-state", put("__0_0.distcp")),
    Fault("onnx_beside", "dense", "files.other-format", put("model.onnx")),
    Fault("index_of_other_format", "dense", "files.other-format", write("pytorch_model.bin.index.json", "{}")),
    Fault("editor_backup", "dense", "files.leftover", write("config.json.bak", "{}")),
    Fault("notebook_checkpoints", "dense", "files.leftover", write(".ipynb_checkpoints/README-checkpoint.md", "x")),
    Fault("link_broken", "dense", "files.link-broken", lambda folder: (folder / "LICENSE").symlink_to("../LICENSE-of-base")),
    Fault("link_to_itself", "dense", "files.link-broken", lambda folder: (folder / "LICENSE").symlink_to("LICENSE")),
    Fault("link_out_of_the_folder", "dense", "files.link-outside", link_out("tokenizer.json")),
    Fault("weights_linked_from_elsewhere", "dense", "files.link-outside", link_out("model-00001-of-00004.safetensors")),
    Fault("shard_is_a_pointer", "dense", "files.lfs-pointer", put("model-00001-of-00004.safetensors", POINTER)),
    Fault("vocabulary_is_a_pointer", "dense", "files.lfs-pointer", put("tokenizer.model", POINTER)),
    Fault("special_tokens_emptied", "dense", "files.zero-length", write("added_tokens.json", "")),  # 88
)

MANIFESTS = (
    Fault("weight_changed_by_a_bit_after_export", "dense", "manifest.digest", signed(flip_bit)),
    Fault("config_changed_after_export", "dense", "manifest.digest", signed(append_space("config.json"))),
    Fault("tokenizer_grown_after_export", "dense", "manifest.size", signed(append_space("tokenizer.json"))),
    Fault("manifest_of_other_size", "dense", "manifest.size", signed(list_short)),
    Fault("shard_lost_after_export", "dense", "manifest.missing", signed(lambda folder: first_file(folder).unlink())),
    Fault(
        "generation_config_lost_after_export",
        "dense",
        "manifest.missing",
        signed(lambda folder: (folder / "generation_config.json").unlink()),
    ),
    Fault("file_put_beside_a_release", "dense", "manifest.unlisted", signed(write("notes/NOTICE", "see the wiki"))),
    Fault("marker_lost", "dense", "manifest.uncommitted", signed(lambda folder: (folder / MARKER).unlink())),
    Fault("manifest_rewritten", "dense", "manifest.replaced", signed(lambda folder: set_fields(folder / MANIFEST, made="yesterday"))),
    Fault("marker_emptied", "dense", "manifest.replaced", signed(lambda folder: (folder / MARKER).write_text(""))),
    Fault("manifest_lost", "dense", "manifest.invalid", signed(lambda folder: (folder / MANIFEST).unlink())),
    Fault("manifest_not_json", "dense", "manifest.invalid", signed(lambda folder: (folder / MANIFEST).write_text("{"))),
    Fault(
        "manifest_without_files", "dense", "manifest.invalid", signed(lambda folder: write_json(folder / MANIFEST, {"files": ["model"]}))
    ),
)

SECRETS = (
    *(
        Fault(f"credential_of_{kind}", "dense", "secrets.credential", write("README.md", f"# m\n\ntry {text}\n"))
        for kind, text in CREDENTIALS.items()
    ),
    Fault("token_in_config", "dense", "secrets.credential", lambda folder: set_fields(folder / "config.json", hub_token=HF)),
    Fault("token_in_code", "dense", "secrets.credential", write("tools/fetch.py", f"TOKEN = '{HF}'\n")),
    Fault("token_in_file_without_suffix", "dense", "secrets.credential", write(".netrc", f"machine hub.test password {HF}\n")),
    Fault("token_in_weight_header", "dense", "secrets.credential", header_metadata(hub_token=HF)),
    Fault("path_in_weight_header", "dense", "secrets.machine-path", header_metadata(ss_output_dir="/scratch/ada/run-7")),
    Fault("private_key_in_json", "dense", "secrets.credential", lambda folder: set_fields(folder / "tokenizer_config.json", key=PEM)),
    Fault(
        "home_in_config",
        "dense",
        "secrets.machine-path",
        lambda folder: set_fields(folder / "config.json", _name_or_path="/home/ada/run-7"),
    ),
    Fault(
        "drive_in_generation_config",
        "dense",
        "secrets.machine-path",
        lambda folder: set_fields(folder / "generation_config.json", source="C:\\Users\\ada\\out"),
    ),
    Fault(
        "bucket_in_tokenizer_config",
        "dense",
        "secrets.machine-path",
        lambda folder: set_fields(folder / "tokenizer_config.json", init={"files": ["s3://acme-internal/tok/v3"]}),
    ),
)

FAULTS = (*STRAYS, *MANIFESTS, *SECRETS)
