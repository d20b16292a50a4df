"""The small batch that logits are compared on: seeded random ids over everything reachable, text and chat where a tokenizer is there.

The same request gives the same ids: the generator is seeded here and nothing else is drawn from it.
"""

from dataclasses import dataclass

import torch

ROWS = 4
MAX_LENGTH = 128
_SEED = 20240229

# One pinned document, written for this purpose: prose, numbers, code, other scripts and punctuation.
TEXT = (
    "The harbour was quiet at half past six. Two boats, the Ann and the Marguerite, lay at the inner quay; a third, 41 tonnes, was due "
    "by noon. “Has anyone counted the crates?” asked the pilot. Nobody had. There were 1,284 of them on Tuesday, 1,279 on Thursday - "
    "five were missing, or had never been there. def count(crates): return sum(1 for crate in crates if crate.sealed)  # O(n)\n"
    "Später fragte jemand: «Où sont les caisses ?» 箱はどこですか。 Никто не ответил. The ratio was 0.9961, which is almost one, and the "
    "clerk wrote it down twice, because a number that is written down twice is easier to believe than a number that is right.\n"
)

CHAT = (
    {"role": "user", "content": "How many crates were missing on Thursday?"},
    {"role": "assistant", "content": "Five: 1,284 minus 1,279."},
    {"role": "user", "content": "Thank you. Write that as a fraction of the whole."},
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids that are run together: (B, S) int64."""

    name: str
    input_ids: torch.Tensor


def random_batch(reachable: int, max_position: int) -> Batch:
    """Return four rows of seeded random ids.

    Every reachable id occurs where there is room, special ids with them; the room left over is drawn at random.

    Args:
        reachable: ids are 0 … reachable-1.
        max_position: the longest sequence the model takes.

    Returns:
        ROWS rows of min(MAX_LENGTH, max_position) ids.
    """
    length = min(MAX_LENGTH, max_position)
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randperm(reachable, generator=generator)[: ROWS * length]
    rest = torch.randint(reachable, (ROWS * length - len(ids),), generator=generator)
    drawn = torch.cat([ids, rest])[torch.randperm(ROWS * length, generator=generator)]
    return Batch("random ids", drawn.reshape(ROWS, length))


def row_batch(name: str, ids: list[int], max_position: int) -> Batch | None:
    """Return one row of text as a batch.

    Args:
        name: what the row is.
        ids: its tokens.
        max_position: the longest sequence the model takes; the row is cut there, or at MAX_LENGTH.

    Returns:
        The batch; None for no tokens.
    """
    row = ids[: min(MAX_LENGTH, max_position)]
    return Batch(name, torch.tensor([row], dtype=torch.int64)) if row else None
