"""A tokenizer as transformers loads it, for what its files do not say by themselves: rendered chats, encoded texts. No check of its own.

The folder's code is never run. transformers is imported only when one of these functions is called.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol, cast

Message = Mapping[str, str]


class _Tokenizer(Protocol):
    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str) -> list[int]: ...
    def apply_chat_template(self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool) -> str: ...


@lru_cache(maxsize=2)  # a release and its reference
def _load(folder: Path) -> _Tokenizer:
    from transformers import AutoTokenizer

    return cast("_Tokenizer", AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))


def list_ids(folder: Path) -> Mapping[str, int]:
    """Return every token's id.

    Args:
        folder: the tokenizer's.

    Returns:
        Token to id, added tokens included.
    """
    return _load(folder).get_vocab()


def encode(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids that texts become, special tokens included as the tokenizer adds them.

    Args:
        folder: the tokenizer's.
        texts: any texts.

    Returns:
        Ids per text.
    """
    tokenizer = _load(folder)
    return [tokenizer.encode(text) for text in texts]


def render_chat(folder: Path, messages: Sequence[Message], *, asks: bool = False) -> str:
    """Return a conversation as the chat template writes it.

    Args:
        folder: the tokenizer's.
        messages: each with `role` and `content`.
        asks: whether the model's answer is asked for (the generation prompt).

    Returns:
        The text.
    """
    return str(_load(folder).apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks))
