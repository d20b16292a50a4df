"""The tokenizer turns texts and chats into the ids that the reference's does: the trainer's assets, or an earlier release.

A tokenizer can be sound by itself and belong to another model: ids moved, a BOS no longer added, another chat template. Vocabularies,
special tokens and settings are compared as their files give them; texts and conversations are encoded, decoded and rendered by
transformers with both. A setting that changes none of these is a warning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from reports.codes import finding
from reports.errors import name_some
from validators.check import Check, Judgement, Outcome, attempt, first_line, has_tokenizer, judge
from validators.expectation import Evidence
from validators.loaded_tokenizer import LoadedTokenizer
from validators.token_files import content_of
from validators.vocabulary import parse_object, read_settings, read_vocabulary

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
# Parts of tokenizer.json that say how texts are cut; the vocabulary, its merges and its added tokens are compared by their ids.
SECTIONS = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
# Settings of tokenizer_config.json that are compared elsewhere, or tell of the writer.
SILENT = frozenset(
    {
        *SPECIALS,
        *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "chat_template", "name_or_path", "tokenizer_file"),
        *("special_tokens_map_file", "processor_class", "auto_map", "backend", "is_local", "local_files_only", "transformers_version"),
    }
)

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Files:
    # What a tokenizer's files say. `fast` is tokenizer.json, empty where there is none.
    settings: Json
    fast: Json
    ids: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> "_Files":
        settings = read_settings(folder)
        return cls(settings, parse_object(folder / "tokenizer.json"), read_vocabulary(folder, settings))

    def added(self) -> list[str]:
        tokens = self.fast.get("added_tokens")
        return [str(token.get("content")) for token in tokens if isinstance(token, Mapping)] if isinstance(tokens, list) else []


def examine(evidence: Evidence) -> Outcome:
    """Hold the release's tokenizer against the reference's.

    Args:
        evidence: a release, and a reference with a tokenizer.

    Returns:
        Findings, and the number of judgements made.
    """
    assert evidence.reference is not None
    ours, theirs = evidence.release.assets, evidence.reference.folder
    if ours is None or not has_tokenizer(ours):
        return Outcome((finding("tokenizer_drift.absent", "tokenizer", expected="one, as the reference has", found="none"),), 1)
    read = attempt(lambda: (_Files.read(ours), _Files.read(theirs)))
    loaded = attempt(lambda: (LoadedTokenizer(ours), LoadedTokenizer(theirs)))
    for tried in (read, loaded):
        if isinstance(tried, Exception):
            found = finding("tokenizer_drift.unreadable", "tokenizer", expected="two tokenizers that load", found=first_line(tried))
            return Outcome((found,), 1)
    assert not isinstance(read, Exception)
    assert not isinstance(loaded, Exception)
    judgements = [
        *_judge_ids(read[0].ids, read[1].ids),
        *_judge_specials(read[0].settings, read[1].settings),
        *_judge_settings(*read),
        *_judge_texts(*loaded, [*TEXTS, " a ".join(read[1].added())]),
        *_judge_chats(*loaded),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"reference": theirs.name, "ids": len(read[1].ids)})


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


def _judge_settings(ours: _Files, theirs: _Files) -> Iterator[Judgement]:
    sections = SECTIONS if ours.fast and theirs.fast else ()
    shared = sorted((ours.settings.keys() & theirs.settings.keys()) - SILENT)
    rows: tuple[tuple[str, Json, Json, Sequence[str]], ...] = (
        ("tokenizer.json", ours.fast, theirs.fast, sections),
        ("tokenizer_config.json", ours.settings, theirs.settings, shared),
    )
    for file, found, expected, keys in rows:
        for key in keys:
            said, wanted = (f"{side.get(key)}"[:100] for side in (found, expected))
            right = found.get(key) == expected.get(key)
            yield judge("tokenizer_drift.setting", f"{file}: {key}", right=right, expected=wanted, found=said)


def _judge_texts(ours: LoadedTokenizer, theirs: LoadedTokenizer, texts: Sequence[str]) -> Iterator[Judgement]:
    for text in texts:
        expected = attempt(partial(theirs.encode, text))
        found = attempt(partial(ours.encode, text))
        if isinstance(expected, Exception) or isinstance(found, Exception):
            words = first_line(found if isinstance(found, Exception) else expected)
            yield finding("tokenizer_drift.unreadable", f"{text[:30]!r}", expected="two tokenizers that encode it", found=words)
            continue
        at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), min(len(found), len(expected)))
        said = f"{found[at : at + 5]} from place {at} of {len(found)} ids"
        wanted = f"{expected[at : at + 5]} there, {len(expected)} ids"
        yield judge("tokenizer_drift.encoding", f"{text[:30]!r}", right=found == expected, expected=wanted, found=said)
        read, meant = (attempt(partial(side.decode, expected)) for side in (ours, theirs))
        yield judge("tokenizer_drift.decoding", f"{text[:30]!r}", right=read == meant, expected=f"{meant!r}", found=f"{read!r}")


def _judge_chats(ours: LoadedTokenizer, theirs: LoadedTokenizer) -> Iterator[Judgement]:
    for name, messages in CHATS.items():
        for asks in (False, True):
            expected = attempt(partial(theirs.render_chat, messages, asks=asks))
            if isinstance(expected, Exception):
                continue  # the reference has no template, or none for such a conversation: nothing to hold against it
            found = attempt(partial(ours.render_chat, messages, asks=asks))
            said = first_line(found) if isinstance(found, Exception) else f"{found!r}"
            where = f"chat template: {name}{', answer asked for' if asks else ''}"
            yield judge("tokenizer_drift.chat-template", where, right=found == expected, expected=f"{expected!r}", found=said)


CHECK = Check("tokenizer_drift", ("folder", "reference_tokenizer"), examine)
