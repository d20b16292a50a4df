"""A tokenizer as GGUF has it: tokens, their types, the name of how text is cut before merges are applied, and what engines put around it.

Only byte-level BPE whose cutting llama.cpp has a name for is written (validators.gguf_cuts). Of any other tokenizer nothing is written, and
the release says so. What stands before and after a text is asked of transformers: engines of llama-bpe put bos first unless they are told.

Source: llama.cpp conversion/base.py, get_vocab_base (types of tokens, names of ids without one).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from validators.check import attempt, first_line
from validators.gguf_cuts import name_cut
from validators.loaded_tokenizer import LoadedTokenizer
from validators.vocabulary import read_settings

BPE, NONE = "gpt2", "none"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's token types
_CONTROLS = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))  # how text begins and ends that is a control token, marked so or not
_CONTROL_TEXTS = frozenset({"<pad>", "<mask>", "<2mass>", "[@BOS@]"})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is written of a tokenizer: `tokens` and `types` by id, as many as the embedding has rows; none where `because` says why.

    `before` and `after` are the ids that it puts around a text.
    """

    pre: str = ""
    tokens: tuple[str, ...] = ()
    types: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
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
    if assets is None or path is None or not path.is_file():
        return Vocabulary(because="no tokenizer.json in --assets")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        cut, because = name_cut(said)
        if cut is None:
            return Vocabulary(because=because)
        added = dict(_added_tokens(said, read_settings(assets)))
        texts = {
            **{int(number): text for text, number in said["model"]["vocab"].items()},
            **{n: row["content"] for n, row in added.items()},
        }
        kinds = {number: _kind(row) for number, row in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Vocabulary(because=f"tokenizer.json is not as tokenizers writes it ({type(error).__name__}: {error})")
    if max(texts, default=0) >= rows:
        return Vocabulary(because=f"its ids go up to {max(texts)}, the embedding has {rows} rows")
    around = attempt(lambda: LoadedTokenizer(assets).around())
    if isinstance(around, Exception):
        return Vocabulary(because=f"transformers does not load it ({first_line(around)})")
    tokens = tuple(texts.get(number, f"[PAD{number}]") for number in range(rows))
    types = tuple(kinds.get(number, NORMAL if number in texts else UNUSED) for number in range(rows))
    return Vocabulary(cut.name, tokens, types, *around)


def _added_tokens(said: Mapping[str, object], settings: Mapping[str, object]) -> Iterator[tuple[int, Mapping[str, str]]]:
    # tokenizer.json's come last: they count.
    decoder, listed = settings.get("added_tokens_decoder"), said.get("added_tokens")
    yield from ((int(number), row) for number, row in (decoder.items() if isinstance(decoder, Mapping) else ()))
    yield from ((int(row["id"]), row) for row in (listed if isinstance(listed, list) else ()))


def _kind(row: Mapping[str, object]) -> int:
    text = str(row["content"])
    looks_so = text in _CONTROL_TEXTS or any(text.startswith(begin) and text.endswith(end) for begin, end in _CONTROLS)
    return CONTROL if row.get("special") or looks_so else USER_DEFINED
