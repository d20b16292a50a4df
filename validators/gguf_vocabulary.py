"""The tokenizer in a GGUF file's header is the one beside it: the ids of a text, what is put around it, and where engines stop.

Judged is byte-level BPE ("gpt2"), against tokenizer.json, the settings, and transformers' own encoding; of any other kind only that the one
beside it is no byte-level BPE. What a key's absence means is llama.cpp's to say.

Sources: llama.cpp src/llama-vocab.cpp (keys, defaults of absent ones); conversion/base.py (types of tokens).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reports.codes import finding
from reports.model import Finding
from validators.check import attempt
from validators.gguf_cuts import Cut, begins_unless_told, name_cut
from validators.gguf_file import GgufFile
from validators.loaded_tokenizer import LoadedTokenizer
from validators.release import Release
from validators.token_files import settle_template, templates_of
from validators.vocabulary import parse_object, read_settings

Json = Mapping[str, object]
_NO_TOKENIZER = ("none", "no_vocab")
_BPE = "gpt2"
_DEFAULT_ID = 11  # which engines take for bos and eos of this kind when a file does not say
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
_ENDS = ("bos", "eos")


@dataclass(frozen=True, slots=True)
class _Beside:
    # The tokenizer beside a file. `cut` is None where llama.cpp has no name for how it cuts text; `ends` the ids that may be bos, and eos.
    cut: Cut | None
    kind: str
    tokens: Mapping[int, str]
    special: frozenset[int]
    added: frozenset[int]
    merges: tuple[str, ...]
    ends: Mapping[str, frozenset[int]]
    templates: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Judged:
    file: GgufFile
    folder: Path
    beside: _Beside

    def said(self, key: str) -> object:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def found(self, code: str, key: str, expected: object, found: object) -> Finding:
        return finding(code, f"{self.file.name}: tokenizer.{key}", expected=str(expected)[:120], found=str(found)[:120])


def judge_vocabulary(file: GgufFile, release: Release) -> Iterator[Finding]:
    """Hold a file's tokenizer against the one beside it.

    Args:
        file: its header.
        release: the folder, with config and tokenizer where there are any.

    Yields:
        Findings; none where there is no readable tokenizer.json, which is another check's to say.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind is None or kind in _NO_TOKENIZER:
        where = f"{file.name}: tokenizer.ggml.model"
        yield finding("gguf.no-tokenizer", where, expected="a tokenizer", found=str(kind or "absent"))
        return
    folder = release.assets
    beside = attempt(lambda: _read_beside(folder, release)) if folder is not None and (folder / "tokenizer.json").is_file() else None
    if folder is None or not isinstance(beside, _Beside):
        return
    judged = _Judged(file, folder, beside)
    if kind == _BPE and beside.kind != "BPE":
        yield judged.found("gguf.tokenizer", "ggml.model", f"the kind of tokenizer.json, {beside.kind}", kind)
    elif kind != _BPE and beside.cut is not None:
        yield judged.found("gguf.tokenizer", "ggml.model", f"{_BPE}, as tokenizer.json is byte-level BPE", kind)
    elif kind == _BPE:
        for judge in _JUDGES:
            yield from judge(judged)


def _read_beside(folder: Path, release: Release) -> _Beside:
    said, settings = parse_object(folder / "tokenizer.json"), read_settings(folder)
    model, rows = said["model"], said.get("added_tokens")
    assert isinstance(model, Mapping)
    added = {int(row["id"]): row for row in (rows if isinstance(rows, list) else ())}
    special = frozenset(number for number, row in added.items() if row.get("special"))
    vocabulary = model.get("vocab")
    tokens = {int(number): str(text) for text, number in (vocabulary.items() if isinstance(vocabulary, Mapping) else ())}
    tokens |= {number: str(row["content"]) for number, row in added.items() if number in special}  # converters normalize the text of others
    ids = {text: number for number, text in tokens.items()} | {str(row["content"]): number for number, row in added.items()}
    merges = model.get("merges") or ()
    return _Beside(
        name_cut(said)[0],
        str(model.get("type")),
        tokens,
        special,
        frozenset(added),
        tuple(pair if isinstance(pair, str) else " ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges),
        {role: _known_ids(role, ids, settings, release) for role in _ENDS},
        frozenset(text for _, text in templates_of(folder)),
    )


def _known_ids(role: str, ids: Mapping[str, int], settings: Json, release: Release) -> frozenset[int]:
    token = settings.get(f"{role}_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    said = [source.get(f"{role}_token_id") for source in (release.config, release.generation_config)]
    listed = [number for value in said for number in (value if isinstance(value, list) else [value])]
    return frozenset(number for number in [*listed, ids.get(str(text))] if isinstance(number, int))


def _judge_tokens(judged: _Judged) -> Iterator[Finding]:
    tokens, wanted = judged.said("tokens"), judged.beside.tokens
    held = tokens if isinstance(tokens, tuple) else ()
    wrong = [number for number, text in wanted.items() if number >= len(held) or held[number] != text]
    if wrong:
        at = min(wrong)
        found = f"{len(wrong)} tokens differ, first id {at}: {str(held[at])[:40]!r}" if at < len(held) else f"{len(held)} tokens"
        yield judged.found("gguf.tokenizer", "ggml.tokens", f"tokenizer.json's, id {at}: {wanted[at][:40]!r}", found)


def _judge_types(judged: _Judged) -> Iterator[Finding]:
    tokens, types, beside = judged.said("tokens"), judged.said("token_type"), judged.beside
    if not isinstance(types, tuple) or not isinstance(tokens, tuple) or len(types) != len(tokens):
        count = len(types) if isinstance(types, tuple) else "absent"
        yield judged.found("gguf.token-type", "ggml.token_type", f"{len(tokens) if isinstance(tokens, tuple) else 0} types", count)
        return
    within = [number for number in sorted(beside.tokens) if number < len(types)]
    plain = [number for number in within if number in beside.special and types[number] != _CONTROL]
    hidden = [number for number in within if number not in beside.added and types[number] in (_CONTROL, _UNUSED)]
    for wrong, kind in ((plain, f"control ({_CONTROL})"), (hidden, f"normal ({_NORMAL})")):
        if wrong:
            at = wrong[0]
            text = beside.tokens[at][:40]
            found = f"{len(wrong)} tokens of other types, first {types[at]}"
            yield judged.found("gguf.token-type", "ggml.token_type", f"{kind}, as id {at}, {text!r}", found)


def _judge_merges(judged: _Judged) -> Iterator[Finding]:
    said, wanted = judged.said("merges"), judged.beside.merges
    held = said if isinstance(said, tuple) else ()
    if held != wanted:
        pairs = zip(held, wanted, strict=False)  # the shorter of two lists of merges
        first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(held), len(wanted)))
        found = f"{len(held)} merges, first that differs {first}: {str(held[first : first + 1])[:40]}"
        yield judged.found("gguf.merges", "ggml.merges", f"{len(wanted)} merges, at {first}: {wanted[first : first + 1]}", found)


def _judge_cut(judged: _Judged) -> Iterator[Finding]:
    cut, said = judged.beside.cut, judged.said("pre")
    if cut is not None and said not in (cut.name, *cut.same):
        yield judged.found("gguf.cut", "ggml.pre", cut.name, said or "absent")


def _judge_ends(judged: _Judged) -> Iterator[Finding]:
    for role in _ENDS:
        said, known = judged.said(f"{role}_token_id"), judged.beside.ends[role]
        is_used = role == "eos" or said is not None or _puts(judged, role)
        if known and is_used and (_DEFAULT_ID if said is None else said) not in known:
            found = f"absent, engines take {_DEFAULT_ID}" if said is None else said
            yield judged.found("gguf.special-id", f"ggml.{role}_token_id", " or ".join(map(str, sorted(known))), found)


def _judge_around(judged: _Judged) -> Iterator[Finding]:
    around = attempt(lambda: LoadedTokenizer(judged.folder).around())
    if isinstance(around, Exception):
        return
    for role, ids in zip(_ENDS, around, strict=True):
        said, puts = judged.said(f"add_{role}_token"), _puts(judged, role)
        if puts != bool(ids):
            found = f"{'absent' if said is None else said}: engines put {'it' if puts else 'none'}"
            yield judged.found("gguf.around", f"ggml.add_{role}_token", f"{bool(ids)}, as transformers encodes", found)


def _judge_template(judged: _Judged) -> Iterator[Finding]:
    said, wanted = judged.file.metadata.get("tokenizer.chat_template"), judged.beside.templates
    if wanted and (not isinstance(said, str) or settle_template(said) not in wanted):
        yield judged.found("gguf.chat-template", "chat_template", "the one beside it", "absent" if said is None else "another")


def _puts(judged: _Judged, role: str) -> bool:
    # Whether engines put the token of a role around a text.
    said = judged.said(f"add_{role}_token")
    return begins_unless_told(str(judged.said("pre"))) if said is None and role == "bos" else bool(said)


_JUDGES: tuple[Callable[[_Judged], Iterator[Finding]], ...] = (
    _judge_tokens,
    _judge_types,
    _judge_merges,
    _judge_cut,
    _judge_ends,
    _judge_around,
    _judge_template,
)
