"""The tables that travel between tasks, as pandera models. A task writes one as CSV and hands on its path; the reader validates it.

Shapes are text, `4x16`; a 0-d tensor's is the empty string.
"""

from pathlib import Path

import pandas as pd
import pandera.pandas as pa
from pandera.typing.pandas import Series

from reports.errors import FormatError, name_some

SHAPE = r"^(\d+(x\d+)*)?$"


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as a table writes it.

    Args:
        shape: element counts per dim.

    Returns:
        `4x16`; empty for a 0-d tensor.
    """
    return "x".join(str(n) for n in shape)


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape a table wrote.

    Args:
        text: what `format_shape` made.

    Returns:
        Element counts per dim.
    """
    return tuple(int(n) for n in text.split("x")) if text else ()


class _Table(pa.DataFrameModel):
    class Config:
        strict = True
        coerce = True


class SourceTable(_Table):
    """One row per tensor of the source checkpoint. `role` is "model" or "state"; `fragments` counts its boxes."""

    name: Series[str] = pa.Field(str_length={"min_value": 1}, unique=True)
    role: Series[str] = pa.Field(isin=["model", "state"])
    dtype: Series[str]
    shape: Series[str] = pa.Field(str_matches=SHAPE)
    fragments: Series[int] = pa.Field(ge=0)


class PlanTable(_Table):
    """One row per released tensor, as planned. `sources` are the consumed boxes, `name[o0:e0,o1:e1]`, joined by `;`."""

    name: Series[str] = pa.Field(str_length={"min_value": 1}, unique=True)
    file: Series[str] = pa.Field(str_length={"min_value": 1})
    dtype: Series[str]
    shape: Series[str] = pa.Field(str_matches=SHAPE)
    nbytes: Series[int] = pa.Field(ge=0)
    op: Series[str]
    encoding: Series[str] = pa.Field(isin=["copy", "cast"])
    sources: Series[str] = pa.Field(str_length={"min_value": 1})


class TensorTable(_Table):
    """One row per released tensor, measured on bytes re-read from disk.

    `absmax`, `rms`, `mean` are over finite elements, in fp64; `nonfinite` counts NaN and infinities; `zero_share` is the share of exact
    zeros; `constant` is 1 when all elements are equal (of more than one); `parity` is the XOR of all elements' bits, in hex.
    `relative_error` is rms(release - source) / rms(source), NaN where nothing was compared. `sample` holds values to compare with, and
    `repeated` the rows of a router, or a matrix outside the layers, that are zero or equal an earlier one: see validators.sampled.
    """

    name: Series[str] = pa.Field(str_length={"min_value": 1})
    file: Series[str] = pa.Field(str_length={"min_value": 1})
    dtype: Series[str]
    shape: Series[str] = pa.Field(str_matches=SHAPE)
    nbytes: Series[int] = pa.Field(ge=0)
    absmax: Series[float] = pa.Field(nullable=True)
    rms: Series[float] = pa.Field(nullable=True)
    mean: Series[float] = pa.Field(nullable=True)
    nonfinite: Series[int] = pa.Field(ge=0)
    zero_share: Series[float] = pa.Field(nullable=True)
    constant: Series[int] = pa.Field(isin=[0, 1])
    parity: Series[str]
    relative_error: Series[float] = pa.Field(nullable=True)
    sample: Series[str]
    repeated: Series[str]


SECOND_COPY = "second copy"  # the witness of weights that a checkpoint holds twice, the copy in lower precision


class ValueTable(_Table):
    """One row per released tensor that a witness compared value by value.

    `numel` elements were compared, `differing` of them are not bit-equal to the witness's (after the declared cast); `max_abs` is the
    largest difference; `first` the flat index of the first (-1 for none). `expected_crc32` and `found_crc32` are of the whole tensor's
    bytes, and only filled (else -1) where values differ: they tell an exchanged tensor from a damaged one. `flushed` counts non-zero
    source values that became zero in the cast.
    """

    name: Series[str] = pa.Field(str_length={"min_value": 1})
    witness: Series[str]
    numel: Series[int] = pa.Field(ge=0)
    differing: Series[int] = pa.Field(ge=0)
    max_abs: Series[float] = pa.Field(nullable=True)
    first: Series[int] = pa.Field(ge=-1)
    expected_crc32: Series[int] = pa.Field(ge=-1)
    found_crc32: Series[int] = pa.Field(ge=-1)
    flushed: Series[int] = pa.Field(ge=0)


class PartTable(_Table):
    """One row per part of a quantized weight, and per scale of the key-value cache.

    `low` and `high` are the least and greatest finite scale, or zero point as a number; NaN for other parts. `nonfinite` counts scales that
    are none. `listed` is the shape that a part writes down, as text. Of the part with the values: `relative_error` is rms(dequantized -
    source) / rms(source), and `rounding` what rounding to the nearest value leaves of it by itself, given these scales; NaN where nothing
    was compared.
    """

    name: Series[str] = pa.Field(str_length={"min_value": 1}, unique=True)
    low: Series[float] = pa.Field(nullable=True)
    high: Series[float] = pa.Field(nullable=True)
    nonfinite: Series[int] = pa.Field(ge=0)
    listed: Series[str]
    relative_error: Series[float] = pa.Field(nullable=True)
    rounding: Series[float] = pa.Field(nullable=True)


class GgufTable(_Table):
    """One row per tensor of a GGUF file that was re-read. `published` is its name in the source, "" where that has no such tensor.

    Where `compared` is 1: of `units` values (blocks, where the type has them) `differing` are not bit-equal to what the source gives, the
    first at `first` (-1 for none); `unpermuted` is 1 when they are what rows in the published order would give; `relative_error` is
    rms(dequantized - source) / rms(source), `rounding` what rounding to the nearest step leaves of it. CRCs are of the whole tensor's
    bytes, -1 where there is none to expect: they tell an exchanged tensor from a damaged one.
    """

    name: Series[str] = pa.Field(str_length={"min_value": 1}, unique=True)
    published: Series[str]
    type: Series[str]
    compared: Series[int] = pa.Field(isin=[0, 1])
    units: Series[int] = pa.Field(ge=0)
    differing: Series[int] = pa.Field(ge=0)
    first: Series[int] = pa.Field(ge=-1)
    unpermuted: Series[int] = pa.Field(isin=[0, 1])
    relative_error: Series[float] = pa.Field(nullable=True)
    rounding: Series[float] = pa.Field(nullable=True)
    expected_crc32: Series[int] = pa.Field(ge=-1)
    found_crc32: Series[int] = pa.Field(ge=-1)


def write_table(model: type[_Table], table: pd.DataFrame, path: Path) -> Path:
    """Validate a table and write it as CSV.

    Args:
        model: the table's model.
        table: its rows.
        path: where to.

    Returns:
        `path`.

    Raises:
        FormatError: the rows do not fit the model.
    """
    _validate(model, table, path).to_csv(path, index=False)
    return path


def read_table(model: type[_Table], path: Path) -> pd.DataFrame:
    """Read a table and validate it.

    Args:
        model: the table's model.
        path: a CSV file that `write_table` wrote.

    Returns:
        The rows; empty text stays empty text.

    Raises:
        FormatError: the rows do not fit the model.
    """
    table = pd.read_csv(path, dtype=str, na_filter=False)  # na_filter would turn a tensor named "nan" into a missing value
    for name, column in model.to_schema().columns.items():
        if name in table and str(column.dtype).startswith(("int", "float")):
            table[name] = pd.to_numeric(table[name])
    return _validate(model, table, path)


def _validate(model: type[_Table], table: pd.DataFrame, path: Path) -> pd.DataFrame:
    try:
        return model.validate(table, lazy=True)
    except pa.errors.SchemaErrors as error:  # one failure case per row and column: folded, never printed whole
        columns = [str(c) for c in error.failure_cases["column"].dropna().unique()]
        checks = [str(c) for c in error.failure_cases["check"].unique()]
        raise FormatError(
            f"table does not fit {model.__name__}: columns {name_some(columns)}; checks {name_some(checks)}",
            where=path.name,
            remedy="This is a fault of the product; please report it with the run folder.",
        ) from None
