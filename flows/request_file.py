"""A request from the command line, over one from a YAML file."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from flows.requests import ExportRequest
from reports.errors import RequestError


def read_request(path: Path | None, given: Mapping[str, object], typed: set[str]) -> ExportRequest:
    """Return an export's request. Of a request file's options, those that are also on the command line are taken from there.

    Args:
        path: YAML file of options, or None.
        given: every option of the command line, defaults included.
        typed: those that the user typed.

    Returns:
        The request.

    Raises:
        RequestError: no source or destination is given, or the file is no YAML mapping.
        ValidationError: an option's value makes no sense.
    """
    for name in ("source", "to"):
        if path is None and given[name] is None:
            raise RequestError("is missing", where="SOURCE" if name == "source" else "--to", remedy="See shardwright export --help.")
    if path is None:
        return ExportRequest.model_validate(given)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"is not YAML: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise RequestError("is not a mapping of option to value", where=str(path))
    return ExportRequest.model_validate({"runs": given["runs"], **content, **{name: given[name] for name in typed & given.keys()}})
