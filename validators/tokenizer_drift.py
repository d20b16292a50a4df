"""The tokenizer turns texts and chats into the ids that the reference's does: the trainer's assets, or an earlier release.

A tokenizer can be sound by itself and belong to another model: ids moved, a BOS no longer added, another chat template. Vocabularies and
special tokens are compared as their files give them; texts and conversations are encoded and rendered by transformers with both.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from reports.codes import finding
from reports.errors import name_some
from validators.check import Check, Judgement, Outcome, attempt, judge
from validators.expectation import Evidence
from validators.loaded_tokenizer import encode, render_chat
from validators.token_files import content_of
from validators.vocabulary import parse_object, read_vocabulary

# Prose, numbers, code, other scripts, spaces: what normalizers, pre-tokenizers and byte fallbacks differ on.
TEXTS = (
    "The Harbour was quiet at half past six; 1,284 crates were due.",
    "  def count(crates):\n\treturn sum(1 for c in crates)  # O(n)\n\n",
    "Später fragte jemand: «Où sont les caisses ?» 箱はどこですか。 Никто 🙂 e\u0301",
    "",
)
CHATS: Mapping[str, tuple[Mapping[str, str], ...]] = MappingProxyType(
    {
        "one question": ({"role": "user", "content": "How many crates were missing?"},),
        "a conversation": (
            {"role": "user", "content": "How many crates were missing?"},
            {"role": "assistant", "content": "Five."},
            {"role": "user", "content": "Thank you."},
        ),
        "with a system message": (
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "How many crates were missing?"},
        ),
    }
)
# Special token → code: a padding token is masked in most uses.
SPECIALS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer_drift.special",
        "eos_token": "tokenizer_drift.special",
        "unk_token": "tokenizer_drift.special",
        "pad_token": "tokenizer_drift.padding",
    }
)


def examine(evidence: Evidence) -> Outcome:
    """Hold the release's tokenizer against the reference's.

    Args:
        evidence: a release and a reference, each with a tokenizer.

    Returns:
        Findings, and the number of judgements made.
    """
    assert evidence.reference is not None
    ours, theirs = evidence.release.assets, evidence.reference.folder
    assert ours is not None
    read = attempt(lambda: [(_settings(folder), read_vocabulary(folder, _settings(folder))) for folder in (ours, theirs)])
    if isinstance(read, Exception):
        return Outcome((finding("tokenizer_drift.unreadable", "tokenizer", expected="two tokenizers that load", found=f"{read}"),), 1)
    (settings, ids), (their_settings, their_ids) = read
    judgements = [
        *_judge_ids(ids, their_ids),
        *_judge_specials(settings, their_settings),
        *_judge_encoding(ours, theirs),
        *_judge_chats(ours, theirs),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"reference": theirs.name, "ids": len(their_ids)})


def _settings(folder: Path) -> Mapping[str, object]:
    return {**parse_object(folder / "special_tokens_map.json"), **parse_object(folder / "tokenizer_config.json")}


def _judge_ids(ids: Mapping[str, int], theirs: Mapping[str, int]) -> Iterator[Judgement]:
    moved = sorted(token for token in ids.keys() & theirs.keys() if ids[token] != theirs[token])
    found = f"{len(moved)} others: {name_some(f'{token} = {ids[token]}' for token in moved)}"
    yield judge("tokenizer_drift.ids", "vocabulary", right=not moved, expected="the reference's ids", found=found)
    lost, added = sorted(theirs.keys() - ids.keys()), sorted(ids.keys() - theirs.keys())
    found = f"{len(lost)} lost: {name_some(lost)}"
    yield judge("tokenizer_drift.lost", "vocabulary", right=not lost, expected="every token of the reference", found=found)
    found = f"{len(added)} more: {name_some(added)}"
    yield judge("tokenizer_drift.added", "vocabulary", right=not added, expected="the reference's tokens", found=found)


def _judge_specials(settings: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[Judgement]:
    for key, code in SPECIALS.items():
        found, expected = content_of(settings.get(key)), content_of(theirs.get(key))
        yield judge(code, f"tokenizer_config.json: {key}", right=found == expected, expected=f"{expected}", found=f"{found}")


def _judge_encoding(ours: Path, theirs: Path) -> Iterator[Judgement]:
    encoded = attempt(lambda: (encode(ours, TEXTS), encode(theirs, TEXTS)))
    if isinstance(encoded, Exception):
        yield finding("tokenizer_drift.unreadable", "tokenizer", expected="two tokenizers that encode", found=f"{encoded}")
        return
    for text, found, expected in zip(TEXTS, *encoded, strict=True):
        at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), min(len(found), len(expected)))
        said = f"{found[at : at + 5]} from place {at} of {len(found)} ids"
        wanted = f"{expected[at : at + 5]} there, {len(expected)} ids"
        yield judge("tokenizer_drift.encoding", f"{text[:30]!r}", right=found == expected, expected=wanted, found=said)


def _judge_chats(ours: Path, theirs: Path) -> Iterator[Judgement]:
    for name, messages in CHATS.items():
        for asks in (False, True):
            expected = attempt(partial(render_chat, theirs, messages, asks=asks))
            if isinstance(expected, Exception):
                continue  # the reference has no template, or none for such a conversation: nothing to hold against it
            found = attempt(partial(render_chat, ours, messages, asks=asks))
            where = f"chat template: {name}{', answer asked for' if asks else ''}"
            yield judge("tokenizer_drift.chat-template", where, right=found == expected, expected=f"{expected!r}", found=f"{found!r}")


CHECK = Check("tokenizer_drift", ("tokenizer", "reference_tokenizer"), examine)
