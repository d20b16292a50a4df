"""Write a release into its stage: one task per weight file, then the files beside them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.errors import FormatError, name_some
from tasks.digests import digest_all
from tasks.engine.planning.plan import ExportPlan, plan_from_json
from tasks.engine.writing.execute import FileRecord, execute_file, verify_shared
from tasks.engine.writing.replicas import check_replicas
from tasks.engine.writing.sidecars import Lineage, write_card, write_manifest, write_sidecars
from tasks.engine.writing.stage import Stage
from tasks.handover import Planned, SourceRef
from tasks.retrying import RETRIES
from tasks.sources import opened, reopened


@task(name="write file", task_run_name="write {name}", cache_policy=NO_CACHE, **RETRIES)
def write_file(ref: SourceRef, planned: Planned, stage: Stage, name: str, progress: Callable[[int], None], with_helper: bool = True) -> int:
    """Write one weight file, unless an earlier run of the same plan has finished it.

    Args:
        ref: the checkpoint.
        planned: the plan.
        stage: where the release is put together.
        name: the file.
        progress: called with bytes written.
        with_helper: whether a second thread computes the digest.

    Returns:
        The file's bytes.
    """
    plan = _read_plan(planned)
    file = next(file for file in plan.files if file.name == name)
    record = stage.finished(file)
    if record is None:
        header = planned.header.read_bytes() if planned.header else b""
        record = execute_file(file, opened(ref), stage.folder / name, progress=progress, with_helper=with_helper, header=header)
        stage.keep(record)
    else:
        progress(file.nbytes)
    return record.nbytes


@task(name="finish release", cache_policy=NO_CACHE)
def finish_release(ref: SourceRef, planned: Planned, stage: Stage, assets: Path | None, lineage: Lineage) -> int:
    """Check that the source is still the one that was planned, what several files share and what is stored twice; then write index,
    config, tokenizer, card and manifest.

    Args:
        ref: the checkpoint.
        planned: the plan.
        stage: all weight files are in it.
        assets: folder of tokenizer files.
        lineage: the run.

    Returns:
        Bytes of replicas compared.
    """
    plan, source = _read_plan(planned), reopened(ref)
    records = _records(plan, stage)
    verify_shared(plan.files, records, source)
    compared = check_replicas(plan, source)
    _refuse_changed(source.catalog.listed)
    config = json.loads(planned.config.read_text(encoding="utf-8")) if planned.config else {}
    write_sidecars(stage.folder, plan, config, assets)
    write_card(stage.folder, plan, lineage, str(config.get("model_type", "")))
    write_manifest(stage.folder, plan, records, lineage)
    return compared


def _refuse_changed(listed: Mapping[str, str]) -> None:
    # Files whose writer noted their sha256: two that were exchanged have sound items, and other values.
    digests = digest_all(Path("/"), listed, workers=2)
    changed = sorted(path for path, digest in digests.items() if digest != listed[path])
    if changed:
        raise FormatError(
            f"sha256 is not what the writer noted in this save: {name_some(Path(path).name for path in changed)}",
            where=str(Path(changed[0]).parent),
            remedy="Restore the files from another copy, or export another step.",
            code="source.file-changed",
        )


def _read_plan(planned: Planned) -> ExportPlan:
    return plan_from_json(planned.path.read_text())


def _records(plan: ExportPlan, stage: Stage) -> tuple[FileRecord, ...]:
    return tuple(stage.record_of(file.name) for file in plan.files)
