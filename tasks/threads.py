"""Torch's threads, while several threads of our own use it: one each, or they wait for each other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let threads that start inside the block run torch on one core each; afterwards all is as it was.

    Yields:
        Nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
