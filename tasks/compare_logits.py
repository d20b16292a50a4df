"""Compare logits on a small batch: the mapping against witnesses, the cast against the merged values."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.planning.plan import plan_from_json
from tasks.engine.writing.execute import execute_file
from tasks.engine.writing.sidecars import write_sidecars
from tasks.forward import ForwardError, why_not_runnable
from tasks.handover import Compared, Loaded, Planned
from tasks.logits_line import Subject, compare, not_compared, read_golden
from tasks.reshard import read_config
from tasks.sources import opened
from validators.check import has_tokenizer
from validators.expectation import expectation_from_json
from validators.gguf_file import coarsest_type
from validators.release import open_release
from validators.tables import ValueTable, write_table


@task(name="check golden", cache_policy=NO_CACHE)
def check_golden(planned: Planned, golden: Path, tokenizer: Path | None) -> None:
    """Refuse recorded logits that cannot be this model's, before anything is written.

    Args:
        planned: the plan; its config says how large the vocabulary is.
        golden: recorded logits.
        tokenizer: folder of a tokenizer, or None.
    """
    assert planned.config is not None
    folder = planned.config.parent
    if not why_not_runnable(folder):
        read_golden(golden, folder, tokenizer if has_tokenizer(tokenizer) else None)


@task(name="merge uncast", cache_policy=NO_CACHE)
def merge_uncast(loaded: Loaded, planned: Planned, folder: Path) -> Path:
    """Write the merged values before any cast: what both logits comparisons are held against.

    Args:
        loaded: the checkpoint.
        planned: the plan.
        folder: made and filled.

    Returns:
        `folder`.
    """
    plan, source = plan_from_json((planned.uncast or planned.whole).read_text()), opened(loaded.ref)
    folder.mkdir(parents=True)
    for file in plan.files:
        execute_file(file, source, folder / file.name)
    config = read_config(planned.config.parent if planned.config else None)
    write_sidecars(folder, plan, {key: value for key, value in config.items() if key != "quantization_config"}, None)
    return folder


@task(name="compare logits", cache_policy=NO_CACHE)
def compare_logits(
    loaded: Loaded,
    planned: Planned,
    release: Path,
    merged: Path,
    run_folder: Path,
    golden: Path | None,
    tokenizer: Path | None,
    memory: int,
) -> Compared:
    """Run the release and hold its logits against what is known.

    Args:
        loaded: the checkpoint.
        planned: the plan.
        release: the stage.
        merged: the release before any cast; the stage itself when nothing is cast.
        run_folder: for tables, and scratch space that is removed again.
        golden: recorded logits.
        tokenizer: folder of a tokenizer that its check has passed.
        memory: bytes that models may take.

    Returns:
        The comparisons.
    """
    expected = expectation_from_json(planned.expected.read_text()) if planned.expected else None
    stored = open_release(release)
    subject = Subject(
        release,
        merged,
        loaded.format,
        loaded.roots,
        planned.source_dtype,
        planned.release_dtype,
        bool(expected and expected.experts),
        golden,
        tokenizer,
        memory,
        release.parent / f"{release.name}-scratch",
        _encodings(planned),
        loaded.ref.weights == "master",
        coarsest_type(stored.ggufs[0]) if stored.is_gguf else "",
    )
    try:
        evidence = compare(subject)
    except ForwardError as error:  # what was written does not load: a failed check of the release, not of the request
        return Compared((not_compared(subject, str(error)),))
    values = None if evidence.values is None else write_table(ValueTable, evidence.values, run_folder / "live_values.csv")
    return Compared(evidence.comparisons, evidence.witnesses, evidence.reason, values)


def _encodings(planned: Planned) -> dict[str, str]:
    if not planned.is_quantized:
        return {}
    plan = plan_from_json(planned.path.read_text())
    return {tensor.part.weight: tensor.encoding for _, tensor in plan.tensors() if tensor.part is not None}
