"""The record of a checkpoint: digests of every tensor and object, written down once, one JSON file.

JSON: `digest` is the sha256 of the entries, so that a damaged record is not taken for a damaged checkpoint.
"""

import hashlib
import json
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from reports.errors import FormatError
from validators.drills.facts import Record

RECORD_NAME = "shardwright.record.json"
SCHEMA = "shardwright.record/1"
_RECORD = TypeAdapter(Record)


def record_to_json(record: Record) -> str:
    """Return a record as JSON.

    Args:
        record: any record.

    Returns:
        Text; equal records give equal text.
    """
    body = asdict(record)
    return json.dumps({"schema": SCHEMA, "digest": _digest(body), **body}, indent=1, sort_keys=True) + "\n"


def record_from_json(text: str, where: str) -> Record:
    """Return the record a text holds.

    Args:
        text: what `record_to_json` made.
        where: the file, for messages.

    Returns:
        The record.

    Raises:
        FormatError: not a record, of another schema, or changed since it was written.
    """
    remedy = "Record the checkpoint again, if you trust it as it is: shardwright record --replace."
    try:
        body = json.loads(text)
        schema, digest = body.pop("schema"), body.pop("digest")
        record = _RECORD.validate_python(body)
    except (ValueError, KeyError, AttributeError, ValidationError, RecursionError) as error:
        raise FormatError(f"is not a record of a checkpoint ({type(error).__name__})", where=where, remedy=remedy) from None
    if schema != SCHEMA or digest != _digest(asdict(record)):
        raise FormatError("is of another schema, or was changed after it was written", where=where, remedy=remedy)
    return record


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
