"""transformers, accelerate and compressed-tensors, without their progress bars and warnings: what matters of those is in our results.

compressed-tensors draws its bars whatever it is told, so nothing written to stderr meanwhile is shown.
"""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Protocol


class Talk(Protocol):
    """The module `transformers.utils.logging`; the caller imports it."""

    def get_verbosity(self) -> int: ...
    def set_verbosity(self, verbosity: int) -> None: ...
    def is_progress_bar_enabled(self) -> bool: ...
    def enable_progress_bar(self) -> None: ...
    def disable_progress_bar(self) -> None: ...


@contextmanager
def quiet(talk: Talk) -> Iterator[None]:
    """Keep these libraries silent, and leave them as they were.

    Args:
        talk: the module `transformers.utils.logging`.

    Yields:
        Nothing.
    """
    accelerate = logging.getLogger("accelerate.big_modeling")
    verbosity, bars, level = talk.get_verbosity(), talk.is_progress_bar_enabled(), accelerate.level
    talk.set_verbosity(logging.ERROR)
    talk.disable_progress_bar()
    accelerate.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()
        accelerate.setLevel(level)
