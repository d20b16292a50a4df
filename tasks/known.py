"""What an earlier run of the gate measured, taken over for weight files whose bytes are the same: measurements, never verdicts."""

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from reports.errors import RequestError
from reports.model import Report, report_from_json
from tasks.handover import Known, Planned
from tasks.measure import Measurement
from validators.release import open_release
from validators.tables import TensorTable, ValueTable, read_table

_DIGESTS = "digests.json"
_TABLES = ("tensors.csv", "values.csv")


def write_digests(run_folder: Path, digests: Mapping[str, str]) -> None:
    """Keep the digests of a run's weight files beside its tables, for a later run.

    Args:
        run_folder: where the tables are.
        digests: sha256 by weight file.
    """
    (run_folder / _DIGESTS).write_text(json.dumps(dict(digests), indent=1) + "\n", encoding="utf-8")


def read_earlier(page: Path) -> Report:
    """Return the report of an earlier run whose measurements can be taken over.

    Args:
        page: its report.json, or the run folder.

    Returns:
        The report.

    Raises:
        RequestError: it is no report of a gate, or the run's tables are gone.
    """
    path = page / "report.json" if page.is_dir() else page
    remedy = "Give the report.json of an earlier gate, in its run folder."
    try:
        report = report_from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"is no report: {str(error)[:200]}", where=str(path), remedy=remedy) from error
    if report.kind != "gate":
        raise RequestError(f"is the report of a run of {report.kind}", where=str(path), remedy=remedy)
    lacking = [name for name in (_DIGESTS, *_TABLES) if not (path.parent / name).is_file()]
    if lacking:
        raise RequestError(f"{', '.join(lacking)} is not beside the report", where=str(path.parent), remedy=remedy)
    return report


def find_known(page: Path, digests: Mapping[str, str], planned: Planned | None, environment: Mapping[str, str]) -> tuple[Known | None, str]:
    """Return what an earlier run measured on files that are unchanged.

    Args:
        page: its report.json, or the run folder.
        digests: sha256 by weight file, as they are now.
        planned: how the source would be exported now; None without one.
        environment: versions now.

    Returns:
        What still holds, None where nothing does; and a sentence for the report.
    """
    report, folder = read_earlier(page), page if page.is_dir() else page.parent
    if report.environment != environment:
        return None, f"measured anew: {report.run_id} ran with other versions"
    if report.plan_digest != (planned.digest if planned else ""):
        return None, f"measured anew: {report.run_id} was held against another source"
    earlier = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
    same = frozenset(name for name, digest in digests.items() if earlier.get(name) == digest)
    said = f"{len(same)} of {len(digests)} weight files are unchanged since {report.run_id}: their measurements were taken over"
    return Known(folder / _TABLES[0], folder / _TABLES[1], same), said


def join_tables(folder: Path, found: Measurement, known: Known) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Put new and earlier measurements together.

    Args:
        folder: the release.
        found: of the files that were read.
        known: of the others.

    Returns:
        A TensorTable and a ValueTable, in the order of the release.
    """
    earlier, values = read_table(TensorTable, known.tensors), read_table(ValueTable, known.values)
    earlier = earlier[earlier["file"].isin(known.files)]
    values = values[values["name"].isin(earlier["name"]) & (values["witness"] == found.witness.name)]
    order = {(tensor.file, tensor.name): at for at, tensor in enumerate(open_release(folder).stored())}
    tensors = pd.concat([found.tensors, earlier], ignore_index=True)
    places = pd.Series([order[file, name] for file, name in zip(tensors["file"], tensors["name"], strict=True)], dtype="int64")
    names = {name: at for at, name in enumerate(tensors["name"].iloc[places.argsort()])}
    values = pd.concat([found.values, values], ignore_index=True)
    return tensors.iloc[places.argsort()].reset_index(drop=True), values.iloc[values["name"].map(names).argsort()].reset_index(drop=True)
