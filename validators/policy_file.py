"""The release policy as a file that owners edit: `policy.yaml`. Strict.

What it does not know, it refuses, with the line and what is allowed.

The default text is made from the tables it speaks of, and reads as the default policy.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from reports.codes import CODES
from reports.errors import RequestError
from reports.model import Waiver
from validators.checks import CHECKS, NAMED
from validators.marked_text import find_line, read_marked, read_text, refuse
from validators.policy import LIMITS, LimitsRow, Policy
from validators.suite import DEFAULT_SUITE, read_suite


def _is_line(text: str) -> str:
    if not text.strip() or any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in text):
        raise ValueError("write one line of text")
    return text


def _is_check(name: str) -> str:
    if name not in (names := [check.name for check in NAMED]):
        raise ValueError(f"no check {name!r}; there are {', '.join(names)}")
    return name


def _is_waivable(code: str) -> str:
    allowed = [name for name, row in CODES.items() if row.severity == "error" and not name.startswith("policy.")]
    if code in allowed:
        return code
    if code in CODES:
        raise ValueError(
            f"{code} cannot be waived: " + ("the policy's own" if code.startswith("policy.") else "a warning turns no verdict")
        )
    alike = [name for name in allowed if name.split(".")[0] == code.split(".")[0]]
    known = f"{code.split('.')[0]} has {', '.join(alike)}" if alike else "codes begin with a check's name; docs/faults.md lists them"
    raise ValueError(f"no code {code!r}; {known}")


_Line = Annotated[str, AfterValidator(_is_line)]
_CheckName = Annotated[str, AfterValidator(_is_check)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LimitsRowChanges(_Strict):
    """The limits of one row that are set; None leaves the product's own. Bounds from above, then from below."""

    mean_kl: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    p95_kl: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    cosine: Annotated[float | None, Field(ge=0, le=1)] = None
    top1: Annotated[float | None, Field(ge=0, le=1)] = None


class WaiverRow(_Strict):
    """One waiver as written: of a check or of a code, at places that match a pattern."""

    check: _CheckName | None = None
    code: Annotated[str, AfterValidator(_is_waivable)] | None = None
    where: _Line = "*"
    owner: _Line
    reason: _Line
    expires: Annotated[date, Field(strict=False)]  # quoted or not

    @model_validator(mode="after")
    def _has_one_subject(self) -> "WaiverRow":
        if (self.check is None) == (self.code is None):
            raise ValueError("give either check or code")
        return self


class PolicyFile(_Strict):
    """A policy as written."""

    required_checks: list[_CheckName] = []
    witnesses: Annotated[int, Field(ge=0, le=10)] = 0
    limits: dict[LimitsRow, LimitsRowChanges] = {}
    statistics: _Line | None = None
    waivers: list[WaiverRow] = []


# Where in the file → the keys allowed there. Numbers in a place (the third waiver) are left out of it.
_ALLOWED: Mapping[tuple[str, ...], Sequence[str]] = MappingProxyType(
    {
        (): list(PolicyFile.model_fields),
        ("limits",): list(LIMITS),
        **{("limits", row): list(LimitsRowChanges.model_fields) for row in LIMITS},
        ("waivers",): list(WaiverRow.model_fields),
    }
)


_DEFAULT = """\
# The release policy of `shardwright gate`. What is left out or empty is the product's own.

# Checks that must not be skipped, by name. The checks are
# {checks}.
required_checks: []

# How many witnesses must prove the mapping: recorded logits (--golden), the framework's own model, an earlier release.
witnesses: 0

# Limits of the logits, per coarsest dtype that took part. KL is in nats; mean_kl and p95_kl are upper limits, cosine and top1 lower ones.
# A number set here replaces the product's; a cast's mean KL stays near the noise floor of its run all the same. The product's own:
# limits:
{limits}
limits: {{}}

# Rules for the statistics of tensors, a Great Expectations suite beside this file. Begin with a copy of the one that is shipped,
# validators/defaults/{suite}.
# statistics: statistics.json

# Errors that may stand until a day: of one code, or of a whole check; at all places, or where a pattern matches (* and ? as in file names).
# A waiver that has expired makes every verdict red until it is renewed or removed; one that waives nothing is reported.
# waivers:
#   - code: tokenizer.eos-mismatch
#     where: "generation_config.json*"
#     owner: Ada Lovelace
#     reason: The chat model ends on either id; serving sets both.
#     expires: 2027-01-31
waivers: []
"""


def default_policy_text() -> str:
    """Return a policy file that says nothing but what is allowed in it.

    Returns:
        Commented YAML; it reads as `Policy()`.
    """
    rows = [f"#   {row}: {{{', '.join(f'{metric}: {limit:g}' for metric, limit in limits.items())}}}" for row, limits in LIMITS.items()]
    return _DEFAULT.format(checks=", ".join(check.name for check in CHECKS), limits="\n".join(rows), suite=DEFAULT_SUITE.name)


def read_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Args:
        path: a YAML file; the statistics suite it names lies relative to it.

    Returns:
        The policy; what the file leaves out is the product's own.

    Raises:
        RequestError: the file cannot be read, is not YAML, or says what a policy cannot say; names file and line.
    """
    return parse_policy(read_text(path, remedy="`shardwright policy init` writes a policy to begin with."), path)


def parse_policy(text: str, path: Path) -> Policy:
    """Return the policy that a text says.

    Args:
        text: YAML.
        path: where it comes from, for messages and places.

    Returns:
        The policy.

    Raises:
        RequestError: not YAML, or not a policy; names file and line.
    """
    root, content = read_marked(text, path)
    try:
        written = PolicyFile.model_validate({} if content is None else content)
    except ValidationError as refused:
        raise refuse(refused, root, path, _ALLOWED) from None
    return Policy(
        required=frozenset(written.required_checks),
        witnesses=written.witnesses,
        limits=_overlay(written.limits),
        suite=_read_named_suite(written.statistics, path, find_line(root, ("statistics",))),
        waivers=tuple(
            Waiver(
                row.check or row.code or "", row.where, row.owner, row.reason, row.expires.isoformat(), f"{path}:{find_line(root, place)}"
            )
            for row, place in ((row, ("waivers", n)) for n, row in enumerate(written.waivers))
        ),
        places={
            "witnesses": f"{path}:{find_line(root, ('witnesses',))}",
            **{check: f"{path}:{find_line(root, ('required_checks', n))}" for n, check in enumerate(written.required_checks)},
        },
    )


def _read_named_suite(name: str | None, path: Path, line: int) -> str:
    if name is None:
        return ""
    suite = path.parent / name
    if not suite.is_file():
        raise RequestError(f"statistics: no file {suite}", where=f"{path}:{line}", remedy="Give a suite's path, relative to the policy.")
    return read_suite(suite)


def _overlay(changes: Mapping[LimitsRow, LimitsRowChanges]) -> Mapping[LimitsRow, Mapping[str, float]]:
    set_here: dict[str, dict[str, float]] = {row: change.model_dump(exclude_none=True) for row, change in changes.items()}
    return MappingProxyType({row: {**limits, **set_here.get(row, {})} for row, limits in LIMITS.items()})
