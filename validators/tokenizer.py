"""The tokenizer fits the embedding, and tokenizer, config and generation config agree on special ids.

Files are parsed as they lie: the vocabulary (validators.vocabulary), tokenizer_config.json (special tokens, limits, chat template),
chat_template.jinja; what several files say of one thing is compared in validators.token_files. The chat template of a written release is
rendered by transformers (validators.loaded_tokenizer).

A special id of null, and a padding id below 0, is unset. A model_max_length absent or above UNSET_LENGTH is unset.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from reports.codes import finding
from reports.errors import name_some
from reports.model import Measure
from validators.check import Check, Judgement, Outcome, attempt, first_line, judge
from validators.config import read_field
from validators.expectation import Evidence
from validators.loaded_tokenizer import LoadedTokenizer
from validators.policy import UNSET_LENGTH
from validators.token_files import content_of, judge_token_files
from validators.vocabulary import read_settings, read_vocabulary

Json = Mapping[str, object]

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
MISMATCH: Mapping[str, str] = MappingProxyType(
    {"bos": "tokenizer.bos-mismatch", "eos": "tokenizer.eos-mismatch", "pad": "tokenizer.pad-mismatch"}
)
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|eot_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>", "[INST]")
_GREETING = ({"role": "user", "content": "hello"},)


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """What a tokenizer's files say. `ids` maps token to id; `template` is its chat template, "" for none."""

    folder: Path
    ids: Mapping[str, int]
    settings: Json
    template: str

    def special_id(self, key: str) -> int | None:
        token = self.special(key)
        return None if token is None else self.ids.get(token)

    def special(self, key: str) -> str | None:
        return content_of(self.settings.get(key))


def examine(evidence: Evidence) -> Outcome:
    """Hold the tokenizer against embedding, config and generation config.

    Args:
        evidence: tokenizer files in release.assets; headers, config and expectation where there are some.

    Returns:
        Findings, and the number of judgements made.
    """
    folder = evidence.release.assets
    assert folder is not None
    parsed = attempt(lambda: (_load(folder), tuple(judge_token_files(folder))))
    if isinstance(parsed, Exception):
        return Outcome((finding("tokenizer.unreadable", str(folder.name), expected="a tokenizer that loads", found=first_line(parsed)),), 1)
    loaded, agreements = parsed
    rows = _embedding_rows(evidence)
    judgements = [
        *_judge_ids(loaded, rows, evidence.release.config, evidence.release.generation_config),
        *_judge_special(loaded, evidence.release.config, evidence.release.generation_config),
        *_judge_length(loaded, evidence.release.config),
        *agreements,
        *_judge_template(loaded, is_written=evidence.release.folder is not None),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    measured: dict[str, Measure] = {"ids": len(loaded.ids), "largest_id": max(loaded.ids.values(), default=-1)}
    if rows is not None:
        measured |= {"embedding_rows": rows, "rows_without_id": rows - len(set(loaded.ids.values()))}
    return Outcome(findings, len(judgements), measured)


def _load(folder: Path) -> _Tokenizer:
    settings = read_settings(folder)
    return _Tokenizer(folder, read_vocabulary(folder, settings), settings, _read_template(folder, settings))


def _read_template(folder: Path, settings: Json) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inline = settings.get("chat_template")
    return inline if isinstance(inline, str) else str(inline or "")  # several named templates are a list


def _embedding_rows(evidence: Evidence) -> int | None:
    stored = evidence.release.by_name()
    if evidence.expected is not None and evidence.expected.embedding in stored:
        return stored[evidence.expected.embedding].shape[0]
    rows = read_field(evidence.release.config, "vocab_size")
    return rows if isinstance(rows, int) else None


def _judge_ids(loaded: _Tokenizer, rows: int | None, config: Json, generation: Json) -> Iterator[Judgement]:
    if rows is None:
        return
    beyond = {index: token for token, index in loaded.ids.items() if index >= rows}
    found = f"{len(beyond)} ids from {min(beyond, default=0)} to {max(beyond, default=0)}: {name_some(beyond.values())}"
    yield judge("tokenizer.too-big", "tokenizer", right=not beyond, expected=f"ids below {rows}, the embedding's rows", found=found)
    for file, source in (("config.json", config), ("generation_config.json", generation)):
        for key in MISMATCH:
            for index in _special_ids(source, key):
                where, right = f"{file}: {key}_token_id", 0 <= index < rows
                yield judge("tokenizer.special-out-of-range", where, right=right, expected=f"0 to {rows - 1}", found=f"{index}")


def _judge_special(loaded: _Tokenizer, config: Json, generation: Json) -> Iterator[Judgement]:
    for key in SPECIAL_TOKENS:
        token = loaded.special(key)
        if token is not None:
            where, right = f"tokenizer_config.json: {key}", token in loaded.ids
            yield judge("tokenizer.special-unknown", where, right=right, expected="a token of the vocabulary", found=token)
    for key, code in MISMATCH.items():
        own = loaded.special_id(f"{key}_token")
        said = {
            "tokenizer": {own} if own is not None else set(),
            "config.json": set(_special_ids(config, key)),
            "generation_config.json": set(_special_ids(generation, key)),
        }
        known = {name: ids for name, ids in said.items() if ids}
        if len(known) < 2:
            continue  # only one of the three says anything: nothing to hold against it
        standard = known.get("generation_config.json") or next(iter(known.values()))  # what generation stops at, where it is said
        agree = all(standard & ids for ids in known.values())
        found = ", ".join(f"{name} {sorted(ids)}" for name, ids in known.items())
        yield judge(code, f"{key}_token_id", right=agree, expected="one id in common", found=found)


def _special_ids(source: Json, key: str) -> Sequence[int]:
    value = read_field(source, f"{key}_token_id")
    values = value if isinstance(value, list) else [value]
    lowest = 0 if key == "pad" else -(2**63)  # a padding id of -1 is the old way to say unset
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool) and index >= lowest]


def _judge_length(loaded: _Tokenizer, config: Json) -> Iterator[Judgement]:
    most, positions = loaded.settings.get("model_max_length"), read_field(config, "max_position_embeddings", "n_positions")
    if isinstance(most, int | float) and most <= UNSET_LENGTH and isinstance(positions, int):
        where = "tokenizer_config.json: model_max_length"
        yield judge("tokenizer.max-length", where, right=most <= positions, expected=f"at most {positions}", found=f"{most:g}")


def _judge_template(loaded: _Tokenizer, *, is_written: bool) -> Iterator[Judgement]:
    chat = [token for token in CHAT_TOKENS if token in loaded.ids]
    if chat:
        found = f"none, but the tokens {', '.join(chat)}"
        where, right = "chat_template.jinja", bool(loaded.template)
        yield judge("tokenizer.chat-template-lost", where, right=right, expected="a chat template", found=found)
    if loaded.template and is_written:
        rendered = attempt(lambda: LoadedTokenizer(loaded.folder).render_chat(_GREETING))
        right = not isinstance(rendered, Exception) and bool(rendered)
        found = first_line(rendered)
        yield judge("tokenizer.chat-template-broken", "chat_template", right=right, expected="renders one message", found=found)


CHECK = Check("tokenizer", ("tokenizer",), examine)
