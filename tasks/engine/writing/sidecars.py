"""The files beside the weights: index, config, tokenizer, model card, manifest."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reports.model import Change
from tasks.engine.planning.plan import ExportPlan
from tasks.engine.writing.execute import FileRecord
from validators.expectation import FLOATS
from validators.release import INDEX_NAME, MANIFEST_NAME, sha256_of

MANIFEST_SCHEMA = "shardwright.manifest/1"
CARD_NAME = "README.md"
# What a release takes over from --assets as it is. Source: the file names transformers' tokenizers and generation read.
COPIED: tuple[str, ...] = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
CONFIG_DTYPES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a manifest says of the run: its id and time (ISO 8601, UTC), package versions, omissions as (what, why), and the tokens that the
    checkpoint had consumed (None: it told none).
    """

    run_id: str
    made: str
    versions: Mapping[str, str]
    omissions: Sequence[tuple[str, str]]
    consumed_tokens: int | None = None


def release_dtype(plan: ExportPlan) -> str:
    """Return the dtype most of a release's float bytes have.

    Args:
        plan: the release.

    Returns:
        A safetensors code; "" for a release without floats.
    """
    nbytes: dict[str, int] = {}
    for _, tensor in plan.tensors():
        if tensor.dtype in FLOATS:
            nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.spec.nbytes
    return max(sorted(nbytes), key=lambda dtype: nbytes[dtype], default="")


def planned_config(config: Mapping[str, object], plan: ExportPlan, *, is_tied: bool) -> tuple[dict[str, object], tuple[Change, ...]]:
    """Return the config a release gets, and what was changed in it.

    Args:
        config: as handed in.
        plan: the release.
        is_tied: whether the head is the embedding.

    Returns:
        The config with `dtype` (and `torch_dtype`, where it is used) and `tie_word_embeddings` set to what is written; the changes.
    """
    dtype = CONFIG_DTYPES.get(release_dtype(plan))
    wanted: dict[str, tuple[object, str]] = {"tie_word_embeddings": (is_tied, "what was written")}
    if dtype is not None:
        wanted["dtype"] = (dtype, "the dtype written")
        if "torch_dtype" in config:
            wanted["torch_dtype"] = (dtype, "the dtype written")
    changes = tuple(
        Change(f"config.json: {key}", json.dumps(config.get(key)) if key in config else "absent", json.dumps(value), because)
        for key, (value, because) in wanted.items()
        if key not in config or config[key] != value
    )
    return {**config, **{key: value for key, (value, _) in wanted.items()}}, changes


def write_sidecars(folder: Path, plan: ExportPlan, config: Mapping[str, object], assets: Path | None) -> None:
    """Write index and config, and copy tokenizer files.

    Args:
        folder: the stage.
        plan: the release.
        config: what `planned_config` returned; empty for none.
        assets: folder of tokenizer files, or None.
    """
    if len(plan.files) > 1:
        weight_map = {tensor.name: file.name for file, tensor in plan.tensors()}
        total = sum(tensor.spec.nbytes for _, tensor in plan.tensors())
        _write_json(
            folder / INDEX_NAME,
            {"metadata": {"total_parameters": plan.num_parameters, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )
    if config:
        _write_json(folder / "config.json", config)
    if assets is not None:
        for name in COPIED:
            if (assets / name).is_file():
                shutil.copyfile(assets / name, folder / name)


def write_card(folder: Path, plan: ExportPlan, lineage: Lineage, model_type: str) -> None:
    """Write a short model card.

    Args:
        folder: the stage.
        plan: the release.
        lineage: the run.
        model_type: config.json's, or "".
    """
    step = "" if plan.source.step is None else f", step {plan.source.step}"
    lines = [
        "---",
        f"library_name: {'gguf' if plan.is_gguf else 'transformers'}",
        *([f"tags: [{model_type}]"] if model_type else []),
        "---",
        "",
        f"# {Path(plan.source.root).name}",
        "",
        f"Exported by Shardwright from a {plan.source.format} checkpoint{step}: {plan.num_parameters:,} parameters in"
        f" {sum(len(f.tensors) for f in plan.files)} tensors, {_stored(plan)}.",
        "",
        f"`{MANIFEST_NAME}` lists every file with its sha256 and where it came from (run `{lineage.run_id}`).",
        *(["", "Left out on purpose:", "", *(f"- `{what}`: {why}" for what, why in lineage.omissions)] if lineage.omissions else []),
        "",
    ]
    (folder / CARD_NAME).write_text("\n".join(lines), encoding="utf-8")


def _stored(plan: ExportPlan) -> str:
    if not plan.is_gguf:
        return CONFIG_DTYPES.get(release_dtype(plan), "mixed dtypes")
    kinds = {tensor.encoding.upper() if tensor.part else tensor.dtype for _, tensor in plan.tensors()}
    return f"in GGUF as {', '.join(sorted(kinds))}"


def write_manifest(folder: Path, plan: ExportPlan, records: Sequence[FileRecord], lineage: Lineage) -> None:
    """Write the manifest: every file of the release with its size and sha256, and where it came from.

    Args:
        folder: the stage, complete but for the manifest and the marker.
        plan: the release.
        records: of the weight files; their digests are taken from here.
        lineage: the run.
    """
    digests = {record.name: (record.nbytes, record.sha256) for record in records}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in digests and path.name != MANIFEST_NAME:
            digests[path.name] = (path.stat().st_size, sha256_of(path))
    _write_json(
        folder / MANIFEST_NAME,
        {
            "schema": MANIFEST_SCHEMA,
            "files": {name: {"nbytes": nbytes, "sha256": sha256} for name, (nbytes, sha256) in sorted(digests.items())},
            "plan_digest": plan.digest,
            "source": {
                "format": plan.source.format,
                "name": Path(plan.source.root).name,
                "step": plan.source.step,
                "consumed_tokens": lineage.consumed_tokens,
                "digest": plan.source.digest,
                "weights": plan.source.weights,
            },
            "family": plan.family,
            "naming": plan.naming,
            "run_id": lineage.run_id,
            "made": lineage.made,
            "versions": dict(lineage.versions),
            "left_out": [{"what": what, "because": why} for what, why in lineage.omissions],
        },
    )


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
