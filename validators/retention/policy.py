"""The retention policy: which saves a run's owner wants kept, as a YAML file. Strict: what it does not know, it refuses.

Its rules combine by "any of them keeps it". What no rule keeps may go, but for what claims of others hold (validators.retention.plan).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reports.errors import RequestError
from validators.marked_text import read_marked, read_text, refuse

_Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PinRow(_Strict):
    """A step that its owner wants kept, and why."""

    step: _Count
    because: Annotated[str, Field(min_length=1)]


class SpikeRule(_Strict):
    """When a logged loss is a spike: above the running median of `window` steps by `deviations` robust standard deviations (1.4826 MAD).

    `floor` is the least rise that counts, as a share of the median: a very smooth loss has almost no deviation.
    """

    window: Annotated[int, Field(ge=5)] = 50
    deviations: Annotated[float, Field(gt=0)] = 8.0
    floor: Annotated[float, Field(ge=0)] = 0.02


class RetentionPolicy(_Strict):
    """What to keep. 0 switches a rule off; the newest saves are always kept.

    `every_steps` and `every_tokens` keep the first save of each stretch; `weights_only_every_steps` keeps its weights alone, where the
    format has them in files of their own; `budget_nbytes` keeps the newest that fit into it beside what must stay. `hold_drilled` says
    whether reports of drills hold the saves they name, as all reports do.
    """

    keep_last: Annotated[int, Field(ge=1, le=1_000_000_000)] = 3
    every_steps: _Count = 0
    every_tokens: _Count = 0
    milestones: Annotated[tuple[_Count, ...], Field(strict=False)] = ()
    pins: Annotated[tuple[PinRow, ...], Field(strict=False)] = ()
    weights_only_every_steps: _Count = 0
    budget_nbytes: _Count = 0
    pin_spikes: bool = True
    pin_data_switches: bool = True
    hold_drilled: bool = True
    tokens_per_step: _Count = 0
    spikes: SpikeRule = SpikeRule()


_ALLOWED: Mapping[tuple[str, ...], Sequence[str]] = MappingProxyType(
    {(): tuple(RetentionPolicy.model_fields), ("pins",): tuple(PinRow.model_fields), ("spikes",): tuple(SpikeRule.model_fields)}
)


def read_retention_policy(path: Path) -> RetentionPolicy:
    """Return a policy that its owner has written.

    Args:
        path: YAML.

    Returns:
        The policy; rules it does not name are off, and the last three saves are kept.

    Raises:
        RequestError: empty, not YAML, an unknown rule, or a value of the wrong kind; names file and line.
    """
    root, content = read_marked(read_text(path, remedy="docs/retention.md shows a policy."), path)
    if content is None:
        raise RequestError(
            "says nothing of what to keep", where=str(path), remedy="Write keep_last: 3, say; docs/retention.md shows a policy."
        )
    try:
        return RetentionPolicy.model_validate(content)
    except ValidationError as refused:
        raise refuse(refused, root, path, _ALLOWED) from None
