"""Token ids as a tokenizer's own files give them, read without the library that would use them.

One parser per vocabulary file, first file found counts: tokenizer.json, a SentencePiece model, vocab.json, vocab.txt. Tokens added later
(added_tokens.json, tokenizer_config.json's added_tokens_decoder) come on top. Only a tokenizer in none of these forms is left to
transformers, which is never allowed to run the folder's code.

Sources: tokenizers 0.23 (tokenizer.json); SentencePiece's sentencepiece_model.proto (ModelProto.pieces is field 1, SentencePiece.piece is
field 1; a piece's id is its place); transformers' tokenization_utils_base (file names, added tokens).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from reports.errors import FormatError
from validators.loaded_tokenizer import LoadedTokenizer

Ids = Mapping[str, int]
_BYTES, _VARINT, _FIXED64, _FIXED32 = 2, 0, 1, 5  # protobuf wire types


def read_vocabulary(folder: Path, settings: Mapping[str, object]) -> Ids:
    """Return every token's id.

    Args:
        folder: the tokenizer's.
        settings: parsed tokenizer_config.json.

    Returns:
        Token to id, later additions included.

    Raises:
        FormatError: a file is damaged, or holds no token.
    """
    ids = dict(_first_vocabulary(folder))
    ids |= {str(token): int(index) for token, index in parse_object(folder / "added_tokens.json").items() if isinstance(index, int)}
    decoder = settings.get("added_tokens_decoder")
    for index, token in (decoder if isinstance(decoder, Mapping) else {}).items():
        if isinstance(token, Mapping):
            ids[str(token.get("content"))] = int(index)
    if not ids:
        raise FormatError("holds no vocabulary", where=folder.name)
    return ids


def read_settings(folder: Path) -> Mapping[str, object]:
    """Return a tokenizer's settings; tokenizer_config.json counts where special_tokens_map.json says otherwise.

    Args:
        folder: the tokenizer's.

    Returns:
        The settings of both files; empty where there is neither.

    Raises:
        FormatError: a file is damaged.
    """
    return {**parse_object(folder / "special_tokens_map.json"), **parse_object(folder / "tokenizer_config.json")}


def parse_object(path: Path) -> Mapping[str, object]:
    """Return the JSON object in a file.

    Args:
        path: any file.

    Returns:
        The object; empty where there is no file.

    Raises:
        FormatError: not JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"not readable as JSON: {error}", where=path.name) from error
    if not isinstance(value, dict):
        raise FormatError("JSON, but not an object", where=path.name)
    return value


def ids_of(fast: Mapping[str, object]) -> Ids:
    """Return every token's id as tokenizer.json gives it.

    Args:
        fast: parsed tokenizer.json.

    Returns:
        Token to id, added tokens included.
    """
    # `model.vocab` is {token: id}, or [[token, score], …] for Unigram; `added_tokens` have their ids.
    model, added = fast.get("model"), fast.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        ids = {str(token): int(index) for token, index in vocabulary.items()}
    else:
        ids = {str(entry[0]): index for index, entry in enumerate(vocabulary if isinstance(vocabulary, list) else [])}
    return ids | {str(token["content"]): int(token["id"]) for token in (added if isinstance(added, list) else [])}


def _first_vocabulary(folder: Path) -> Ids:
    for name, parse in PARSERS.items():
        if (folder / name).is_file():
            return parse(folder / name)
    return LoadedTokenizer(folder).ids()


def _of_tokenizer_json(path: Path) -> Ids:
    from tokenizers import Tokenizer

    parsed = parse_object(path)
    Tokenizer.from_file(str(path))  # refuses what no loader could use
    return ids_of(parsed)


def _of_sentencepiece(path: Path) -> Ids:
    pieces = [piece for field, piece in _fields(path.read_bytes(), path.name) if field == 1]
    texts = [next((text for field, text in _fields(piece, path.name) if field == 1), b"") for piece in pieces]
    return {text.decode("utf-8", "replace"): index for index, text in enumerate(texts)}


def _of_vocab_json(path: Path) -> Ids:
    return {token: index for token, index in parse_object(path).items() if isinstance(index, int)}


def _of_vocab_txt(path: Path) -> Ids:
    return {token: index for index, token in enumerate(path.read_text(encoding="utf-8").splitlines())}


PARSERS: Mapping[str, Callable[[Path], Ids]] = MappingProxyType(
    {
        "tokenizer.json": _of_tokenizer_json,
        "tokenizer.model": _of_sentencepiece,
        "spiece.model": _of_sentencepiece,
        "sentencepiece.bpe.model": _of_sentencepiece,
        "vocab.json": _of_vocab_json,
        "vocab.txt": _of_vocab_txt,
    }
)


def _fields(message: bytes, where: str) -> Iterator[tuple[int, bytes]]:
    # The length-delimited fields of a protobuf message, in order; numbers are stepped over.
    at = 0
    while at < len(message):
        key, at = _varint(message, at, where)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            _, at = _varint(message, at, where)
            continue
        if wire not in (_BYTES, _FIXED64, _FIXED32):
            raise FormatError("not a SentencePiece model", where=where)
        length, at = _varint(message, at, where) if wire == _BYTES else (8 if wire == _FIXED64 else 4, at)
        if at + length > len(message):
            raise FormatError("a SentencePiece model that ends too early", where=where)
        if wire == _BYTES:
            yield field, message[at : at + length]
        at += length


def _varint(message: bytes, at: int, where: str) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise FormatError("a SentencePiece model that ends too early", where=where)
