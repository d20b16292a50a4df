"""How a tokenizer cuts text, in llama.cpp's names.

Only byte-level BPE has a name here: it decides how a serving engine encodes text, and a wrong one is worse than none.

Source: llama.cpp src/llama-vocab.cpp (patterns by name, names that mean the same, and that llama-bpe tries whole words before merges).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Json = Mapping[str, object]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = ""  # ByteLevel's own pattern


@dataclass(frozen=True, slots=True)
class Cut:
    """A way to cut text: the normalizers it may have, other names of it, and whether engines put bos before text unless they are told."""

    name: str
    normalizers: tuple[str | None, ...] = (None,)
    same: tuple[str, ...] = ()
    begins: bool = False


# By pattern, and whether whole words are tried before merges.
_CUTS: Mapping[tuple[str, bool], Cut] = MappingProxyType(
    {
        (_WORDS % r"\p{N}{1,3}", True): Cut(
            "llama-bpe", same=("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), begins=True
        ),
        (_WORDS % r"\p{N}", False): Cut("qwen2", (None, "NFC"), ("deepseek-r1-qwen", "kormo", "f2llmv2")),
        (_GPT2, False): Cut("gpt-2", same=("phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "mellum", "modern-bert")),
    }
)


def name_cut(said: Json) -> tuple[Cut | None, str]:
    """Return how a tokenizer cuts text.

    Args:
        said: parsed tokenizer.json.

    Returns:
        The cut, and ""; or None, and why llama.cpp has no name for it.

    Raises:
        KeyError, TypeError, AttributeError: it is not as tokenizers writes it.
    """
    model = said["model"]
    if not isinstance(model, Mapping):
        raise TypeError("its model is no object")
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback" if model.get("byte_fallback") else model.get("type")
        return None, f"it is {kind}; GGUF files are written with byte-level BPE only"
    steps = _steps(said.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None, "its text is not cut into bytes last, as byte-level BPE does"
    pattern = _pattern(steps, last)
    cut = _CUTS.get((pattern, bool(model.get("ignore_merges")))) if pattern is not None else None
    if cut is None:
        return None, f"llama.cpp has no name for how it cuts text; known are {', '.join(row.name for row in _CUTS.values())}"
    normalizer = said.get("normalizer")
    kind = normalizer.get("type") if isinstance(normalizer, Mapping) else normalizer
    return (cut, "") if kind in cut.normalizers else (None, f"it normalizes text ({kind}), which {cut.name} does not")


def begins_unless_told(name: str) -> bool:
    """Say whether engines put the first special token before text when a file does not say.

    Args:
        name: tokenizer.ggml.pre.

    Returns:
        Whether they do.
    """
    return any(cut.begins and name in (cut.name, *cut.same) for cut in _CUTS.values())


def _pattern(steps: list[Json], last: Json) -> str | None:
    patterns = [step.get("pattern") for step in steps[:-1]]
    if not patterns:
        return _GPT2 if last.get("use_regex", True) else None
    if len(patterns) > 1 or last.get("use_regex", True) or steps[0].get("behavior") != "Isolated":
        return None
    (pattern,) = patterns
    return str(pattern.get("Regex")) if isinstance(pattern, Mapping) else None


def _steps(said: object, key: str) -> list[Json]:
    if not isinstance(said, Mapping):
        return []
    return list(said[key]) if said.get("type") == "Sequence" else [said]
