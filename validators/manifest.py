"""A release that `export` made is still the one its manifest and commit marker describe, byte for byte.

The manifest is `{"files": {name: {"nbytes", "sha256"}}}` and lists every file but itself and the marker; the marker is
`{"manifest_sha256"}` and is written last. Digests of weight files come with the evidence, where the gate has computed them; the
other files are small and hashed here. A release still in its stage has no marker yet, and keeps its progress beside the files.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Judgement, Outcome, judge
from validators.expectation import Evidence
from validators.release import MANIFEST_NAME, MARKER_NAME, STAGE_FOLDER, Release, is_bookkeeping, parse_json_object, sha256_of

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
    sizes, digests = _sizes(release), {**evidence.digests, **_hash_small_files(release, entries)}
    judgements = [
        *([] if evidence.in_stage else _judge_marker(release.folder)),
        *(judgement for name, entry in entries.items() for judgement in _judge_entry(name, entry, sizes, digests)),
        *_judge_unlisted(sizes, entries, in_stage=evidence.in_stage),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"listed": len(entries), "hashed": len(set(digests) & set(entries))})


def _entries(release: Release) -> Mapping[str, Mapping[str, object]] | None:
    entries = release.manifest.get("files")
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        return None
    return entries


def _sizes(release: Release) -> Mapping[str, int]:
    # Bytes of every file; of weight files as their headers were read.
    assert release.folder is not None
    unread = (*release.others, *(bad.file for bad in release.malformed))
    return {name: (release.folder / name).stat().st_size for name in unread} | release.weight_files()


def _hash_small_files(release: Release, entries: Mapping[str, object]) -> Digests:
    assert release.folder is not None
    return {name: sha256_of(release.folder / name) for name in release.others if name in entries}


def _judge_marker(folder: Path) -> Iterator[Judgement]:
    marker = folder / MARKER_NAME
    yield judge("manifest.uncommitted", MARKER_NAME, right=marker.is_file(), expected="a commit marker", found="absent")
    if marker.is_file():
        content = parse_json_object(marker)
        named = content if isinstance(content, str) else content.get("manifest_sha256")
        actual = sha256_of(folder / MANIFEST_NAME)
        yield judge(
            "manifest.replaced", MANIFEST_NAME, right=named == actual, expected=f"sha256 {named} (marker)", found=f"sha256 {actual}"
        )


def _judge_entry(name: str, entry: Mapping[str, object], sizes: Mapping[str, int], digests: Digests) -> Iterator[Judgement]:
    yield judge("manifest.missing", name, right=name in sizes, expected="a file", found="absent")
    if name not in sizes:
        return
    listed, nbytes = entry.get("nbytes"), sizes[name]
    yield judge("manifest.size", name, right=listed == nbytes, expected=f"{listed} bytes", found=f"{nbytes} bytes")
    if name in digests:
        expected, right = f"sha256 {entry.get('sha256')}", entry.get("sha256") == digests[name]
        yield judge("manifest.digest", name, right=right, expected=expected, found=f"sha256 {digests[name]}")


def _judge_unlisted(sizes: Mapping[str, int], entries: Mapping[str, object], *, in_stage: bool) -> Iterator[Finding]:
    for name in sorted(set(sizes) - set(entries) - {MANIFEST_NAME, MARKER_NAME}):
        if not is_bookkeeping(name) and not (in_stage and name.startswith(STAGE_FOLDER)):
            yield finding("manifest.unlisted", name, expected="only files that the manifest lists", found="a file beyond them")


CHECK = Check("manifest", ("manifest",), examine)
