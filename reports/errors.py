"""The refusals: what is raised when the work cannot be done.

    ReleaseError
    ├── RequestError(ValueError)          the request contradicts itself or names what is not there
    ├── FormatError(ValueError)           not a checkpoint we read, or an incomplete or damaged one
    │   └── HostilePickleError            a pickle asks for a global outside the closed list
    ├── CoverageError(ValueError)         fragments leave a hole in a tensor, or overlap
    ├── ReplicaError(ValueError)          the same region is stored twice, with different values
    ├── UnmappedError(KeyError)           names no rule maps, and targets no source feeds
    ├── ShapeError(ValueError)            a tensor has another shape than the config implies
    ├── EncodingError(ValueError)         values do not fit the dtype asked for
    ├── CommitError(FileExistsError)      the destination is taken, or locked by another run
    └── ServerError(RuntimeError)         the embedded Prefect server did not start

Every message has three parts: what, where, what to do. A finding (reports.model.Finding) is different: a value, made by a check
that did its work. A refusal that has a finding's code leaves a report with that finding.
"""

from collections.abc import Iterable


def name_some(names: Iterable[str], limit: int = 5) -> str:
    """Return at most `limit` names, sorted, then a count of the rest: `a, b, … and 7 more`.

    Args:
        names: any number of names; duplicates count once.
        limit: how many are spelled out.

    Returns:
        One line of text; `none` for no names.
    """
    unique = sorted(set(names))
    if not unique:
        return "none"
    shown = ", ".join(unique[:limit])
    return shown if len(unique) <= limit else f"{shown}, … and {len(unique) - limit} more"


class ReleaseError(Exception):
    """The work could not be done.

    Args:
        what: what is wrong, as a sentence.
        where: the file, tensor or field it is wrong at; empty when `what` says it.
        remedy: what the reader should do.
        code: of reports.codes, where the refusal is about the checkpoint itself and leaves a report; else empty.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "", code: str = "") -> None:
        self.what, self.where, self.remedy, self.code = what, where, remedy, code
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head.removesuffix('.')}. {self.remedy}" if self.remedy else head


class RequestError(ReleaseError, ValueError):
    """The request contradicts itself or names what is not there."""


class FormatError(ReleaseError, ValueError):
    """Not a checkpoint we read, or an incomplete or damaged one."""


class HostilePickleError(FormatError):
    """A pickle asks for a global outside the closed list; nothing of it was run."""


class CoverageError(ReleaseError, ValueError):
    """Fragments leave a hole in a tensor, or overlap."""


class ReplicaError(ReleaseError, ValueError):
    """The same region is stored more than once, with different values."""


class UnmappedError(ReleaseError, KeyError):
    """Names no rule maps, and targets no source feeds.

    Args:
        what: what is wrong.
        where: which family and naming.
        remedy: what to do.
        missing: targets without a source.
        phantom: sources without a rule.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "", missing: Iterable[str] = (), phantom: Iterable[str] = ()) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.missing, self.phantom = tuple(missing), tuple(phantom)


class ShapeError(ReleaseError, ValueError):
    """A tensor has another shape than the config implies."""


class EncodingError(ReleaseError, ValueError):
    """Values do not fit the dtype asked for."""


class CommitError(ReleaseError, FileExistsError):
    """The destination is taken, or locked by another run."""


class ServerError(ReleaseError, RuntimeError):
    """The embedded Prefect server did not start."""
