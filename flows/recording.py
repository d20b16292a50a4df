"""Writing down a checkpoint's digests, and listing earlier drills. Imports no Prefect server."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from flows.run_folder import now, versions
from reports.errors import CommitError
from reports.moment import Moment
from reports.spell import spell_bytes, spell_seconds
from reports.write import replace_text
from tasks.drill import make_record, read_save
from tasks.drill_history import read_history
from tasks.engine.formats.readers import open_checkpoint
from tasks.saves import list_saves, of_step
from validators.drills.evidence import Drilled
from validators.drills.objectives import NOT_KNOWN
from validators.drills.record import RECORD_NAME, record_to_json
from validators.drills.stored import read_stored


def record_checkpoint(checkpoint: Path, also: tuple[Path, ...], step: int | None, *, replace: bool, workers: int) -> tuple[Path, int]:
    """Write the digests of a checkpoint beside its files, whole or not at all.

    Args:
        checkpoint: its folder, or a run's root.
        also: more roots of the same save.
        step: which step of a run's root.
        replace: whether an earlier record may be replaced.
        workers: tensors read at a time.

    Returns:
        The file, and how many entries it holds.

    Raises:
        CommitError: there is a record.
        FormatError: the checkpoint is incomplete or damaged.
    """
    root = Path(open_checkpoint(checkpoint.absolute(), also=also, step=step).catalog().root)
    path = root / RECORD_NAME
    if path.exists() and not replace:
        raise CommitError("is recorded already", where=str(path), remedy="Give --replace if the checkpoint was changed on purpose.")
    (save,) = list_saves(root, of_step(also, root.name)).saves
    with tempfile.TemporaryDirectory() as folder:
        drilled = read_stored(Drilled, read_save.fn(save, None, Path(folder), workers, perf_counter))
    made = make_record(drilled, "record", versions(), now())
    return replace_text(path, record_to_json(made)), len(made.entries)


def print_history(runs: Path, root: Path | None, *, as_json: bool) -> None:
    """Print earlier drills, the newest last.

    Args:
        runs: where run folders go.
        root: of which run; None for all.
        as_json: whether to print a JSON line each.
    """
    history = read_history(runs, root)
    if as_json:
        for past in history:
            print(json.dumps(asdict(past)))
        return
    if not history:
        print(f"no drill in {runs}")
    for past in history:
        mark = "green" if past.green else "red"
        times = f"RTO {_spell(past.rto_seconds)}, RPO {_spell(past.rpo_seconds)}, {spell_bytes(past.nbytes)}"
        step = Moment(past.step, past.consumed_tokens).spell() or "no step"
        whose = f"  of {past.root}" if root is None else ""
        print(f"{past.finished}  {past.level}  {step}  {mark:<5}  {times}  {past.run_id}{whose}")
        if not past.green:
            print(f"    {past.verdict}")


def _spell(seconds: float | None) -> str:
    return NOT_KNOWN if seconds is None else spell_seconds(seconds)
