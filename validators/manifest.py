"""A release that `export` made is still the one its manifest and commit marker describe, byte for byte.

The manifest is `{"files": {name: {"nbytes", "sha256"}}}` and lists every file but itself and the marker; the marker is
`{"manifest_sha256"}` and is written last. Digests of weight files come with the evidence, where the gate has computed them; the
other files are small and hashed here. A release still in its stage has no marker yet, and keeps its progress beside the files.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Judgement, Outcome, judge
from validators.expectation import Evidence
from validators.release import MANIFEST_NAME, MARKER_NAME, STAGE_FOLDER, Release, is_bookkeeping, parse_json_object

Digests = Mapping[str, str]


def examine(evidence: Evidence) -> Outcome:
    """Hold every file against the manifest, and the manifest against the marker.

    Args:
        evidence: a folder with a manifest or a marker; digests of weight files where they were computed.

    Returns:
        Findings, and the number of judgements made.
    """
    release = evidence.release
    assert release.folder is not None
    entries = _entries(release)
    if entries is None:
        found = finding("manifest.invalid", MANIFEST_NAME, expected="files: {name: {nbytes, sha256}}", found="absent, or of another form")
        return Outcome((found,), 1)
    digests = {**evidence.digests, **_hash_small_files(release, entries)}
    judgements = [
        *([] if evidence.in_stage else _judge_marker(release.folder)),
        *(judgement for name, entry in entries.items() for judgement in _judge_entry(release, name, entry, digests)),
        *_judge_unlisted(evidence, entries),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"listed": len(entries), "hashed": len(set(digests) & set(entries))})


def _entries(release: Release) -> Mapping[str, Mapping[str, object]] | None:
    entries = release.manifest.get("files")
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        return None
    return entries


def _hash_small_files(release: Release, entries: Mapping[str, object]) -> Digests:
    assert release.folder is not None
    return {name: _sha256(release.folder / name) for name in release.others if name in entries}


def _judge_marker(folder: Path) -> Iterator[Judgement]:
    marker = folder / MARKER_NAME
    yield judge("manifest.uncommitted", MARKER_NAME, right=marker.is_file(), expected="a commit marker", found="absent")
    if marker.is_file():
        content = parse_json_object(marker)
        named = content if isinstance(content, str) else content.get("manifest_sha256")
        actual = _sha256(folder / MANIFEST_NAME)
        yield judge(
            "manifest.replaced", MANIFEST_NAME, right=named == actual, expected=f"sha256 {named} (marker)", found=f"sha256 {actual}"
        )


def _judge_entry(release: Release, name: str, entry: Mapping[str, object], digests: Digests) -> Iterator[Judgement]:
    assert release.folder is not None
    is_there = name in release.others or any(name == file.name for file in release.files)
    is_there = is_there or any(name == bad.file for bad in release.malformed)
    yield judge("manifest.missing", name, right=is_there, expected="a file", found="absent")
    if not is_there:
        return
    nbytes = (release.folder / name).stat().st_size
    yield judge(
        "manifest.size", name, right=entry.get("nbytes") == nbytes, expected=f"{entry.get('nbytes')} bytes", found=f"{nbytes} bytes"
    )
    if name in digests:
        expected, right = f"sha256 {entry.get('sha256')}", entry.get("sha256") == digests[name]
        yield judge("manifest.digest", name, right=right, expected=expected, found=f"sha256 {digests[name]}")


def _judge_unlisted(evidence: Evidence, entries: Mapping[str, object]) -> Iterator[Finding]:
    release = evidence.release
    held = {*release.others, *(file.name for file in release.files), *(bad.file for bad in release.malformed)}
    for name in sorted(held - set(entries) - {MANIFEST_NAME, MARKER_NAME}):
        if not is_bookkeeping(name) and not (evidence.in_stage and name.startswith(STAGE_FOLDER)):
            yield finding("manifest.unlisted", name, expected="only files that the manifest lists", found="a file beyond them")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CHECK = Check("manifest", ("manifest",), examine)
