"""Files, headers and index agree with each other, byte for byte. Reads no tensor value.

A sound weight file: 8 bytes, a header, then tensors back to back from offset 0 to the last byte, each as long as shape and dtype say,
`format: pt` in the metadata. The index names every tensor with the file it is in, and no other; no weights lie beside it.
What else lies in the folder is judged in validators.beside.

Source: safetensors 0.8 README, format section; transformers' index (`weight_map`, `metadata.total_size`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

from reports.codes import finding
from reports.model import Finding
from validators.beside import LFS_POINTER, judge_beside, read_head
from validators.check import Check, Outcome
from validators.expectation import ITEMSIZE, Evidence
from validators.release import INDEX_NAME, WEIGHTS, Release, WeightFile, keys_twice

SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", INDEX_NAME)
SINGLE_NAME = "model.safetensors"  # the one name loaders find without an index


def examine(evidence: Evidence) -> Outcome:
    """Judge every file of the release, and the index.

    Args:
        evidence: headers.

    Returns:
        Findings, and the number of files looked at.
    """
    release = evidence.release
    findings = [
        *_judge_malformed(release),
        *(found for file in release.files for found in _judge_layout(file)),
        *_judge_names(release),
        *_judge_settings(release),
        *_judge_index(release),
        *_judge_strays(release),
        *judge_beside(evidence),
    ]
    stored = list(release.stored())
    measured = {
        "files": len(release.files),
        "tensors": len(stored),
        "tensor_nbytes": sum(tensor.stop - tensor.start for tensor in stored),
    }
    return Outcome(tuple(findings), len(release.files) + len(release.ggufs) + len(release.malformed), measured)


def _judge_malformed(release: Release) -> Iterator[Finding]:
    if not (release.files or release.ggufs) and not any(bad.file.endswith(WEIGHTS) for bad in release.malformed):
        yield finding("files.none", str(release.folder), expected="at least one .safetensors or .gguf file", found="none")
    for bad in release.malformed:
        head = read_head(release.folder / bad.file) if release.folder is not None else ""
        code = "files.malformed" if head else "files.zero-length"
        yield finding("files.lfs-pointer" if re.match(LFS_POINTER, head) else code, bad.file, found=bad.why)


def _judge_layout(file: WeightFile) -> Iterator[Finding]:
    if file.metadata.get("format") != "pt":
        yield finding("files.no-format", file.name, expected="format: pt", found=f"metadata {dict(file.metadata)}")
    for name in file.twice:
        yield finding(
            "files.duplicate-key", f"{file.name}: {name}", expected="once in the header", found="more than once: readers differ in which"
        )
    cursor = 0
    for tensor in file.tensors:
        where = f"{file.name}: {tensor.name}"
        if tensor.start != cursor:
            code = "files.hole" if tensor.start > cursor else "files.overlap"
            yield finding(code, where, expected=f"start {cursor}", found=f"start {tensor.start}")
        cursor = max(cursor, tensor.stop)
        if tensor.dtype not in ITEMSIZE:
            yield finding("files.unknown-dtype", where, expected=", ".join(ITEMSIZE), found=tensor.dtype)
            continue
        nbytes = prod(tensor.shape) * ITEMSIZE[tensor.dtype]
        if tensor.stop - tensor.start != nbytes:
            kind = f"{nbytes} bytes for {tensor.dtype} {tensor.shape}"
            yield finding("files.size-mismatch", where, expected=kind, found=f"{tensor.stop - tensor.start} bytes")
        if nbytes == 0:
            yield finding("files.empty-tensor", where, expected="values", found=f"shape {tensor.shape}")
    total = file.data_start + cursor
    if file.nbytes != total:
        code = "files.truncated" if file.nbytes < total else "files.trailing-bytes"
        yield finding(code, file.name, expected=f"{total} bytes", found=f"{file.nbytes} bytes")


def _judge_names(release: Release) -> Iterator[Finding]:
    counts = Counter(tensor.name for tensor in release.stored())
    for name, count in counts.items():
        if count > 1:
            files = sorted(tensor.file for tensor in release.stored() if tensor.name == name)
            yield finding("files.name-in-two-files", name, expected="one file", found=", ".join(files))


def _judge_settings(release: Release) -> Iterator[Finding]:
    if release.folder is None:
        return
    for name in SETTINGS:
        for key in keys_twice(release.folder / name):
            yield finding("files.duplicate-key", f"{name}: {key}", expected="once", found="more than once")


def _judge_index(release: Release) -> Iterator[Finding]:
    if not release.index:
        return
    listed = weight_map(release)
    if listed is None:
        yield finding("files.index-invalid", INDEX_NAME, expected="weight_map: {tensor: file}", found=f"keys {sorted(release.index)}")
        return
    held = {file.name: {tensor.name for tensor in file.tensors} for file in release.files}
    unreadable = {bad.file for bad in release.malformed}
    for missing in sorted(set(listed.values()) - set(held) - unreadable):
        count = sum(file == missing for file in listed.values())
        yield finding("files.index-shard-missing", missing, expected=f"a file with {count} tensors", found="no such file")
    for name, file in listed.items():
        if file in held and name not in held[file]:
            elsewhere = next((other for other in held if name in held[other]), "no file")
            yield finding("files.index-wrong-shard", name, expected=f"in {file}", found=f"in {elsewhere}")
    for tensor in release.stored():
        if tensor.name not in listed:
            yield finding("files.index-unlisted", tensor.name, expected=f"listed in {INDEX_NAME}", found=f"only in {tensor.file}")
    yield from _judge_total_size(release)


def _judge_total_size(release: Release) -> Iterator[Finding]:
    metadata = release.index.get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    actual = sum(tensor.stop - tensor.start for tensor in release.stored())
    if declared != actual:
        where = f"{INDEX_NAME}: metadata.total_size"
        yield finding("files.total-size", where, expected=f"{actual}", found="absent" if declared is None else f"{declared}")


def _judge_strays(release: Release) -> Iterator[Finding]:
    names = [file.name for file in release.files]
    index_is_bad = any(bad.file == INDEX_NAME for bad in release.malformed)
    listed = weight_map(release) or {}
    if listed:
        known = set(listed.values())
    elif index_is_bad or release.index:
        known = set(names)  # the index itself has been reported
    elif SINGLE_NAME in names:
        known = {SINGLE_NAME}
    else:
        known = set(names)
        if names:
            yield finding("files.index-missing", INDEX_NAME, expected=f"an index, or one {SINGLE_NAME}", found=f"{len(names)} weight files")
    for stray in sorted(set(names) - known):
        yield finding("files.stray-weights", stray, expected="only files the index names", found="weights no loader is told of")


def weight_map(release: Release) -> Mapping[str, str] | None:
    """Return the index's map from tensor to file.

    Args:
        release: any release.

    Returns:
        The map, or None where the index has none that is valid.
    """
    listed = release.index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        return None
    return listed


CHECK = Check("files", ("headers",), examine)
