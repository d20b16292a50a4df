"""What requests show to be wrong before any work: paths first, which need no library that takes seconds to load."""

import os
from collections.abc import Iterable, Sequence
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING

from flows.drill_requests import DrillRequest
from flows.requests import ExportRequest, GateRequest
from reports.errors import RequestError
from reports.paths import real_path
from tasks.engine.formats.readers import check_folder
from tasks.engine.writing.lock import refuse_taken

if TYPE_CHECKING:
    from validators.check import Check


@singledispatch
def refuse_paths(request: object) -> None:
    """Raise when a path that a request names is missing, of the wrong kind, taken, or lies where nothing may be written.

    Args:
        request: to a flow that has a row here.

    Raises:
        ReleaseError: what, where, and what to do.
        TypeError: no such flow.
    """
    raise TypeError(type(request).__name__)


@refuse_paths.register
def _of_export(request: ExportRequest) -> None:
    refuse_inside_source(request)
    refuse_taken(request.to.absolute())
    parent = next(folder for folder in request.to.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise RequestError("is a file, so nothing can be written into it", where=f"--to {parent}", remedy="Choose another --to.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError("cannot be written", where=str(parent), remedy="Choose another --to, or change its permissions.")
    for root in (request.source, *request.also):
        check_folder(root)
    refuse_inputs(request)


@refuse_paths.register
def _of_gate(request: GateRequest) -> None:
    release = request.release
    if not release.is_dir():
        what = "is a file, not a folder" if release.exists() else "does not exist"
        raise RequestError(what, where=str(release), remedy="Give the folder of config.json and weights.")
    if not os.access(release, os.R_OK | os.X_OK):
        raise RequestError("cannot be read", where=str(release), remedy="Change its permissions.")
    if real_path(request.runs).is_relative_to(real_path(release)):
        remedy = "Choose another --runs: a gate changes nothing."
        raise RequestError("lies inside the release", where=f"--runs {request.runs}", remedy=remedy)
    for folder in (request.against, request.assets):
        if folder is not None:
            check_folder(folder)
    _refuse_golden(request.golden)


@refuse_paths.register
def _of_drill(request: DrillRequest) -> None:
    for folder in (request.root, *request.also):
        check_folder(folder)
    if real_path(request.runs).is_relative_to(real_path(request.root)):
        raise RequestError("lies inside the run", where=f"--runs {request.runs}", remedy="Choose another --runs: a drill changes nothing.")
    for name, path in (("--goals", request.goals), ("--log", request.log)):
        if path is not None and not path.is_file():
            raise RequestError("is not a file", where=f"{name} {path}", remedy="Check the path.")


def refuse_inside_source(request: ExportRequest) -> None:
    """Raise when something would be written into the checkpoint.

    Args:
        request: what to export.

    Raises:
        RequestError: the destination or the run folders lie inside it.
    """
    for option, path in (("--to", request.to), ("--runs", request.runs)):
        for root in (request.source, *request.also):
            if real_path(path).is_relative_to(real_path(root)):
                raise RequestError(
                    f"lies inside the checkpoint {root}",
                    where=f"{option} {path}",
                    remedy=f"No export writes into its source: choose another {option}.",
                )


def refuse_inputs(request: ExportRequest) -> None:
    """Raise when what an export reads beside the checkpoint is not there.

    Args:
        request: what to export.

    Raises:
        RequestError: the assets are no folder, or the recorded logits no file.
    """
    if request.assets is not None and not request.assets.is_dir():
        what = "is a file, not a folder" if request.assets.exists() else "does not exist"
        raise RequestError(what, where=f"--assets {request.assets}", remedy="Give the folder of config.json and tokenizer.")
    _refuse_golden(request.golden)


def _refuse_golden(golden: Path | None) -> None:
    if golden is not None and not golden.is_file():
        what = "is a folder, not a file" if golden.exists() else "does not exist"
        raise RequestError(what, where=f"--golden {golden}", remedy="Give the safetensors file that the trainer recorded.")


def refuse_unknown_checks(skipped: Iterable[str], checks: "Sequence[Check]") -> None:
    """Raise when a check is left out that there is not.

    Args:
        skipped: names that --skip gives.
        checks: those that will run.

    Raises:
        RequestError: one of the names is none of theirs.
    """
    names = [check.name for check in checks]
    unknown = sorted(set(skipped) - set(names))
    if unknown:
        raise RequestError(f"no check {unknown[0]!r}", where="--skip", remedy=f"There are {', '.join(names)}.")
