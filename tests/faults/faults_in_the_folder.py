"""Planted faults of what lies in the folder beside weights and index: manifest and marker, credentials and paths."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tests.builders.editing import edit_json, first_file, set_fields, write_json
from tests.faults.planting import Fault

MANIFEST, MARKER = "shardwright.json", "shardwright.committed"
# Made up, in the issuers' forms; cut in two so that no scanner takes this file for a leak.
HF = "hf_" + "QwErTyUiOpAsDfGhJkLzXcVbNmPoIuYtRe"
PEM = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gt\n"
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

FAULTS = (*MANIFESTS, *SECRETS)
