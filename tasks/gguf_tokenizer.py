"""A tokenizer as GGUF has it: tokens, their types and the name of how text is cut before merges are applied.

Only byte-level BPE whose cutting llama.cpp has a name for is written: that name decides how a serving engine encodes text, and a wrong one
is worse than none. Of any other tokenizer nothing is written, and the release says so.

Sources: llama.cpp src/llama-vocab.cpp (patterns by name, and that llama-bpe tries whole words before merges).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BPE, NONE = "gpt2", "none"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's token types
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = ""  # ByteLevel's own pattern
# How text is cut, and whether whole words are tried before merges: llama.cpp's name.
_CUTS: Mapping[tuple[str, bool], str] = {
    (_WORDS % r"\p{N}{1,3}", True): "llama-bpe",
    (_WORDS % r"\p{N}", False): "qwen2",
    (_GPT2, False): "gpt-2",
}
_NORMALIZERS = {"llama-bpe": (None,), "qwen2": (None, "NFC"), "gpt-2": (None,)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is written of a tokenizer: `tokens` and `types` by id, as many as the embedding has rows; none where `because` says why."""

    pre: str = ""
    tokens: tuple[str, ...] = ()
    types: tuple[int, ...] = ()
    because: str = ""


def read_vocabulary(assets: Path | None, rows: int) -> Vocabulary:
    """Return a folder's tokenizer in GGUF's terms.

    Args:
        assets: the folder, or None.
        rows: of the embedding; ids beyond the tokenizer's are unused tokens.

    Returns:
        The vocabulary, or why there is none.
    """
    path = assets / "tokenizer.json" if assets is not None else None
    if path is None or not path.is_file():
        return Vocabulary(because="no tokenizer.json in --assets")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        model, added = said["model"], said.get("added_tokens") or []
        pre, because = _name_cut(said, model)
        if because:
            return Vocabulary(because=because)
        texts = {**{int(number): text for text, number in model["vocab"].items()}, **{int(row["id"]): row["content"] for row in added}}
        kinds = {int(row["id"]): CONTROL if row.get("special") else USER_DEFINED for row in added}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Vocabulary(because=f"tokenizer.json is not as tokenizers writes it ({type(error).__name__}: {error})")
    if max(texts, default=0) >= rows:
        return Vocabulary(because=f"its ids go up to {max(texts)}, the embedding has {rows} rows")
    tokens = tuple(texts.get(number, f"[PAD{number}]") for number in range(rows))
    types = tuple(kinds.get(number, NORMAL if number in texts else UNUSED) for number in range(rows))
    return Vocabulary(pre, tokens, types)


def _name_cut(said: Mapping[str, object], model: Mapping[str, object]) -> tuple[str, str]:
    # llama.cpp's name for how text is cut, or why it has none.
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback" if model.get("byte_fallback") else model.get("type")
        return "", f"it is {kind}; GGUF files are written with byte-level BPE only"
    steps = _steps(said.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return "", "its text is not cut into bytes last, as byte-level BPE does"
    patterns = [step.get("pattern") for step in steps[:-1]]
    cut = _GPT2 if not patterns and last.get("use_regex", True) else None
    if len(patterns) == 1 and not last.get("use_regex", True) and steps[0].get("behavior") == "Isolated":
        pattern = patterns[0]
        cut = str(pattern.get("Regex")) if isinstance(pattern, Mapping) else None
    pre = _CUTS.get((cut, bool(model.get("ignore_merges")))) if cut is not None else None
    if pre is None:
        return "", f"llama.cpp has no name for how it cuts text; known are {', '.join(_CUTS.values())}"
    normalizer = said.get("normalizer")
    kind = normalizer.get("type") if isinstance(normalizer, Mapping) else normalizer
    return (pre, "") if kind in _NORMALIZERS[pre] else ("", f"it normalizes text ({kind}), which {pre} does not")


def _steps(said: object, key: str) -> list[Mapping[str, object]]:
    if not isinstance(said, Mapping):
        return []
    return list(said[key]) if said.get("type") == "Sequence" else [said]
