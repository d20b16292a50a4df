"""A tokenizer as transformers loads it, for what its files do not say by themselves: rendered chats, encoded texts. No check of its own.

The folder's code is never run. transformers is imported only when a tokenizer is opened.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

Message = Mapping[str, str]
_PROBE = "a text"


class _Library(Protocol):
    def get_vocab(self) -> dict[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[Message], *, tokenize: bool, add_generation_prompt: bool) -> str: ...


class LoadedTokenizer:
    """A tokenizer as its folder has it now.

    Args:
        folder: its files.

    Raises:
        Exception: whatever the library raises for files it does not like.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._library = cast("_Library", AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False))

    def ids(self) -> Mapping[str, int]:
        """Return every token's id.

        Returns:
            Token to id, added tokens included.
        """
        return self._library.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the ids that a text becomes, special tokens included as the tokenizer adds them.

        Args:
            text: any text.

        Returns:
            Its ids.
        """
        return self._library.encode(text)

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that are put around every text.

        Returns:
            Those before it, and those after it.

        Raises:
            ValueError: the text's own ids are not among those with special tokens.
        """
        bare, whole = (self._library.encode(_PROBE, add_special_tokens=adds) for adds in (False, True))
        starts = [at for at in range(len(whole) - len(bare) + 1) if bare and whole[at : at + len(bare)] == bare]
        if not starts:
            raise ValueError("its ids of a text change when special tokens are added")
        return tuple(whole[: starts[0]]), tuple(whole[starts[0] + len(bare) :])

    def decode(self, ids: Sequence[int]) -> str:
        """Return what a user sees of ids: their text without special tokens.

        Args:
            ids: of this tokenizer.

        Returns:
            The text.
        """
        return self._library.decode(list(ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Return a conversation as the chat template writes it.

        Args:
            messages: each with `role` and `content`.
            asks: whether the model's answer is asked for (the generation prompt).

        Returns:
            The text.
        """
        return str(self._library.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks))
