"""No text of a release carries a credential, and no setting a path of the machine it was made on.

Text is any file without a zero byte near its start, and the metadata of a weight file.

Credentials are known by their shape: CREDENTIALS has one row per issuer, and the part that is random must look random, so that
the examples of a manual (`hf_xxxx…`, `AKIA…EXAMPLE`, `https://user:password@host`) are not taken for one. What is found is never
repeated: a report is read by more people than the file.

Paths are looked for in the values of settings only. Vocabularies hold any text, prose may speak of paths, and special tokens may
look like one.

Sources: token formats as published by GitHub (secret scanning patterns), AWS, Google, OpenAI, Hugging Face; RFC 7468 for PEM blocks.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence
from validators.release import is_bookkeeping, parse_json_object

PEEKED_NBYTES = 4096  # a file without a zero byte among its first ones is text
NEWLINE = b"\n"
FEWEST_CHARACTERS = 8  # distinct ones in the random part of a real credential; a placeholder repeats few
_PLACEHOLDER = re.compile(rb"(?i)example|placeholder|your|redacted|dummy|changeme|passw|secret|x{4}|\*{3}|1234567|abcdefg")


@dataclass(frozen=True, slots=True)
class _Credential:
    """One issuer's shape. It begins with one of the `clues`, which are looked for first; group 1 of the pattern is the random part."""

    kind: str
    clues: tuple[bytes, ...]
    pattern: re.Pattern[bytes]


def _token(kind: str, clues: tuple[bytes, ...], random: bytes) -> _Credential:
    # A token stands by itself: what it begins and ends at is no character of a token.
    start = b"|".join(re.escape(clue) for clue in clues)
    return _Credential(kind, clues, re.compile(rb"(?<![A-Za-z0-9_/+-])(?:" + start + rb")" + random + rb"(?![A-Za-z0-9_-])"))


_MIXED = rb"(?=[A-Za-z0-9_-]*[A-Z])(?=[A-Za-z0-9_-]*[a-z])(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{20,}"
CREDENTIALS: tuple[_Credential, ...] = (
    _token("Hugging Face token", (b"hf_", b"api_org_"), rb"([A-Za-z0-9]{34,40})"),
    _token("key of a model provider", (b"sk-",), rb"(?:proj-|svcacct-|admin-|ant-[a-z0-9]+-|or-v1-)?(" + _MIXED + rb"|[0-9a-f]{32,})"),
    _token("GitHub token", (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"), rb"([A-Za-z0-9]{36,255})"),
    _token("GitHub token", (b"github_pat_",), rb"([A-Za-z0-9_]{22,255})"),
    _token("GitLab token", (b"glpat-",), rb"([A-Za-z0-9_-]{20,})"),
    _token("AWS access key", (b"AKIA", b"ASIA"), rb"([A-Z0-9]{16})"),
    _token("Google API key", (b"AIza",), rb"([A-Za-z0-9_-]{35})"),
    _token("Slack token", (b"xoxa-", b"xoxb-", b"xoxp-", b"xoxr-", b"xoxs-"), rb"([A-Za-z0-9-]{20,})"),
    _token("PyPI token", (b"pypi-",), rb"([A-Za-z0-9_-]{50,})"),
    _token("JSON web token", (b"eyJ",), rb"[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.([A-Za-z0-9_-]{20,})"),
    _Credential("Weights & Biases key", (b"WANDB_API_KEY",), re.compile(rb"\w+[\"']?\s*[:=]\s*[\"']?([0-9a-f]{40})(?![0-9a-f])")),
    _Credential(
        "AWS secret key",
        (b"aws_secret_access_key", b"AWS_SECRET_ACCESS_KEY"),
        re.compile(rb"\w+[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9/+]{40})(?![A-Za-z0-9/+])"),
    ),
    _Credential(
        "private key",
        (b"-----BEGIN ",),
        re.compile(rb"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----[\s\S]{0,400}?([A-Za-z0-9+/]{48,})"),
    ),
    _Credential("password in a URL", (b"://",), re.compile(rb"://[^\s/:@\"'<>{}$`\\]{1,100}:([^\s/:@\"'<>{}$`\\]{6,200})@[A-Za-z0-9]")),
)

# A value that is a path and nothing else: a URI of a file or a store, a drive, a home, or an absolute path of two parts and more.
_PATH = re.compile(
    r"(?:file|s3|gs|hdfs|abfss?|dbfs|nfs)://\S+|[A-Za-z]:[\\/](?![\\/])[^\n]+|\\\\[\w.-]+\\[^\n]+|~[\w.-]*/[^\n]+"
    r"|/(?:root|home|mnt|Users|tmp)/?|/[\w.@+ -]+(?:/[\w.@+ =-]+)+/?"
)
_SETTINGS = re.compile(r"(?:^|/)(?:[\w.-]*config|special_tokens_map|params)\.json$")
_WORDS_OF_THE_MODEL = frozenset({"added_tokens_decoder", "chat_template", "extra_special_tokens", "additional_special_tokens", "vocab"})


def examine(evidence: Evidence) -> Outcome:
    """Look through every text file and weight header, and through the values of settings.

    Args:
        evidence: a folder.

    Returns:
        Findings, and the number of files read.
    """
    release = evidence.release
    assert release.folder is not None
    texts = [name for name in release.others if not is_bookkeeping(name) and _is_text(release.folder / name)]
    findings: list[Finding] = []
    for name in texts:
        path = release.folder / name
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
            findings += find_credentials(text, name)
        if _SETTINGS.search(name):
            settings = parse_json_object(path)
            findings += _find_paths(settings if isinstance(settings, Mapping) else {}, name)
    for weights in release.files:
        where = f"{weights.name}: metadata"
        findings += find_credentials("\n".join(weights.metadata.values()).encode("utf-8", "replace"), where)
        findings += _find_paths(weights.metadata, where)
    nbytes = sum((release.folder / name).stat().st_size for name in texts)
    return Outcome(tuple(findings), len(texts) + len(release.files) or 1, {"text_files": len(texts), "text_nbytes": nbytes})


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(PEEKED_NBYTES)
    return bool(head) and b"\0" not in head


def find_credentials(text: bytes | mmap, where: str) -> Iterator[Finding]:
    """Yield a finding per credential in a text.

    Args:
        text: need not be UTF-8.
        where: what it is the text of.

    Yields:
        Findings that name line and kind, and never the credential.
    """
    for row in CREDENTIALS:
        for start in _places(text, row.clues):
            match = row.pattern.match(text, start)
            if match and is_random(match[1]):
                line, length = text[:start].count(NEWLINE) + 1, match.end() - start
                yield finding("secrets.credential", f"{where}: line {line}", expected="none", found=f"{row.kind}, {length} characters")


def _places(text: bytes | mmap, clues: Sequence[bytes]) -> Iterator[int]:
    for clue in clues:
        start = text.find(clue)
        while start >= 0:
            yield start
            start = text.find(clue, start + 1)


def is_random(secret: bytes) -> bool:
    """Return whether the random part of a credential looks random, and not like the placeholder of an example.

    Args:
        secret: what is random in it.

    Returns:
        Whether somebody could use it.
    """
    return len(set(secret)) >= min(FEWEST_CHARACTERS, len(secret) - 2) and not _PLACEHOLDER.search(secret)


def _find_paths(settings: Mapping[str, object], where: str) -> Iterator[Finding]:
    for field, value in _strings(settings, ""):
        if _PATH.fullmatch(value):
            yield finding("secrets.machine-path", f"{where}: {field}", expected="no path of a machine", found=value)


def _strings(value: object, field: str) -> Iterator[tuple[str, str]]:
    # Every text below a value, with its dotted field; not the model's own words, which may be any text.
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _WORDS_OF_THE_MODEL and not key.endswith("_token"):
                yield from _strings(item, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, f"{field}[{index}]")


CHECK = Check("secrets", ("folder",), examine)
