"""Gather the evidence and run the checks: on the plan, before a byte is written, and on the release as re-read from disk."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.model import CheckResult, EncodedWeight, TensorStatistics, Witness
from tasks.engine.planning.plan import TensorPlan, plan_from_json
from tasks.handover import Compared, Judged, Known, Measured, Planned, ReleaseFacts
from tasks.known import join_tables
from tasks.measure import measure
from tasks.measure_copies import measure_copies
from tasks.measure_gguf import measure_ggufs
from tasks.reference import reference_of
from tasks.reshard import read_config
from tasks.retrying import RETRIES
from validators.check import Check, run
from validators.checks import CHECKS_BEFORE_WRITING, CHECKS_OF_EXPORT, CHECKS_OF_GGUF, checks_of, of_headers
from validators.expectation import ITEMSIZE, Evidence, Expectation, expectation_from_json
from validators.quantized_names import expect_stored
from validators.release import Release, StoredTensor, WeightFile, open_release
from validators.tables import GgufTable, PartTable, PlanTable, TensorTable, ValueTable, read_table, write_table

_BY_GGUF = "those stored are held by gguf_values; no live model to hold the merged ones against"


@task(name="check plan", cache_policy=NO_CACHE)
def check_plan(planned: Planned, assets: Path | None, skips: Mapping[str, str], clock: Callable[[], float]) -> Judged:
    """Run the checks that need no tensor byte.

    Args:
        planned: the plan.
        assets: folder of the tokenizer.
        skips: check → reason.
        clock: seconds.

    Returns:
        Their results.
    """
    evidence = Evidence(_planned_release(planned, assets), _expected_of(planned), plan=read_table(PlanTable, planned.table))
    return Judged(_run_all(CHECKS_BEFORE_WRITING, evidence, skips, clock))


@task(name="measure release", cache_policy=NO_CACHE, **RETRIES)
def measure_release(
    folder: Path, planned: Planned | None, roots: tuple[Path, ...], run_folder: Path, workers: int, known: Known | None = None
) -> Measured:
    """Read every released tensor once, for statistics and against the second path.

    Args:
        folder: the stage.
        planned: the plan; None where there is no source, so that no witness is heard.
        roots: the source's folders; none without a plan.
        run_folder: for the tables.
        workers: tensors read at a time.
        known: what an earlier run has measured on files that are unchanged; they are not read again.

    Returns:
        Paths of the tables.
    """
    if open_release(folder).is_gguf:
        return _measure_ggufs(folder, planned, roots, run_folder, workers)
    unchanged = known.files if known else frozenset()
    found = measure(folder, plan_path=planned.whole if planned else None, source_roots=roots, workers=workers, without=unchanged)
    tensors, values = (found.tensors, found.values) if known is None else join_tables(folder, found, known)
    more: tuple[Witness, ...] = ()
    if planned is not None:
        copies, said = measure_copies(folder, plan_path=planned.whole, source_roots=roots, workers=workers)
        values = pd.concat([values, copies], ignore_index=True) if len(copies) else values
        more = (said,) if said is not None else ()
    return Measured(
        write_table(TensorTable, tensors, run_folder / "tensors.csv"),
        write_table(ValueTable, values, run_folder / "values.csv"),
        write_table(PartTable, found.parts, run_folder / "parts.csv"),
        found.witness,
        more,
    )


def _measure_ggufs(folder: Path, planned: Planned | None, roots: tuple[Path, ...], run_folder: Path, workers: int) -> Measured:
    found = measure_ggufs(folder, planned.whole if planned else None, roots, workers)
    empty = {model: pd.DataFrame(columns=list(model.to_schema().columns)) for model in (ValueTable, PartTable)}
    return Measured(
        write_table(TensorTable, found.tensors, run_folder / "tensors.csv"),
        write_table(ValueTable, empty[ValueTable], run_folder / "values.csv"),
        write_table(PartTable, empty[PartTable], run_folder / "parts.csv"),
        found.witness,
        gguf=write_table(GgufTable, found.compared, run_folder / "gguf.csv") if found.witness.heard else None,
    )


@task(name="check release", cache_policy=NO_CACHE)
def check_release(
    folder: Path, planned: Planned, measured: Measured, compared: Compared, skips: Mapping[str, str], clock: Callable[[], float]
) -> Judged:
    """Run the checks of an export on the release as it lies on disk.

    Args:
        folder: the stage.
        planned: the plan.
        measured: its tables.
        compared: what the logits showed.
        skips: check → reason.
        clock: seconds.

    Returns:
        The results, in the order of CHECKS_OF_EXPORT, or of CHECKS_OF_GGUF.
    """
    values = _BY_GGUF if planned.is_gguf else measured.witness.detail
    absent = {"logits": compared.reason, "values": values, "family": "--family none", "config": "none given"}
    evidence = replace(_evidence(folder, measured, compared, absent), expected=_expected_of(planned), in_stage=True)
    evidence = _with_plan(evidence, planned)
    return Judged(_run_all(CHECKS_OF_GGUF if planned.is_gguf else CHECKS_OF_EXPORT, evidence, skips, clock))


@task(name="check folder", cache_policy=NO_CACHE)
def check_folder(facts: ReleaseFacts, suite: str, skips: Mapping[str, str], clock: Callable[[], float]) -> Judged:
    """Run every check on a finished release.

    Args:
        facts: what is known of it.
        suite: JSON text of the policy's statistics suite, "" for the one that is shipped.
        skips: check → reason.
        clock: seconds.

    Returns:
        The results of `checks_of`, in its order.
    """
    evidence = replace(gather_evidence(facts), suite=suite)
    return Judged(_run_all(checks_of(evidence.release), evidence, skips, clock))


@task(name="check headers", cache_policy=NO_CACHE)
def check_headers(facts: ReleaseFacts, skips: Mapping[str, str], clock: Callable[[], float]) -> Judged:
    """Run the checks that need no tensor byte.

    Args:
        facts: what is known of a release before a tensor is read.
        skips: check → reason.
        clock: seconds.

    Returns:
        The results of `checks_of`, in its order; the other checks are skipped.
    """
    evidence = gather_evidence(facts)
    checks = checks_of(evidence.release)
    early = {result.check: result for result in _run_all(of_headers(checks), evidence, skips, clock)}
    unread = {check.name: CheckResult(check.name, "skipped", reason="stopped early") for check in checks}
    return Judged(tuple({**unread, **early}.values()))


def gather_evidence(facts: ReleaseFacts) -> Evidence:
    """Put together what is known of a finished release.

    Args:
        facts: by the tasks before.

    Returns:
        The evidence.
    """
    described, planned, measured, compared = facts.described, facts.planned, facts.measured, facts.compared
    alone = "nothing to compare with (--against)"
    absent = {"logits": compared.reason, "family": described.reason, "config": "no config.json", "plan": alone, "tokenizer": "none in it"}
    absent["values"] = (_BY_GGUF if measured.gguf else measured.witness.detail) if planned and measured else alone
    absent["gguf_values"] = measured.witness.detail if planned and measured else alone
    evidence = replace(
        _evidence(described.folder, measured, compared, absent),
        expected=_expected(described.expected),
        digests=facts.digests,
        reference=reference_of(facts.referred) if facts.referred else None,
    )
    return evidence if planned is None else _with_plan(evidence, planned)


def _with_plan(evidence: Evidence, planned: Planned) -> Evidence:
    table = read_table(PlanTable, planned.table)
    is_cast = bool((table["encoding"] == "cast").any())
    return replace(evidence, plan=table, dtype=planned.release_dtype if is_cast else "")


def _evidence(folder: Path, measured: Measured | None, compared: Compared, absent: Mapping[str, str]) -> Evidence:
    has_values = measured is not None and measured.gguf is None and any(witness.heard for witness in measured.witnesses)
    found = measured.values if measured is not None and has_values else None
    heard = [path for path in (found, compared.values) if path is not None]
    return Evidence(
        open_release(folder),
        tensors=read_table(TensorTable, measured.tensors) if measured else None,
        values=pd.concat([read_table(ValueTable, path) for path in heard], ignore_index=True) if heard else None,
        parts=read_table(PartTable, measured.parts) if measured else None,
        witnesses=(*(measured.witnesses if measured else ()), *compared.witnesses),
        logits=compared.comparisons,
        reasons=absent,
        gguf=read_table(GgufTable, measured.gguf) if measured and measured.gguf else None,
    )


def _run_all(
    checks: tuple[Check, ...], evidence: Evidence, skips: Mapping[str, str], clock: Callable[[], float]
) -> tuple[CheckResult, ...]:
    return tuple(
        CheckResult(check.name, "skipped", reason=f"--skip: {skips[check.name]}") if check.name in skips else run(check, evidence, clock)
        for check in checks
    )


def _expected(stored: Path | None) -> Expectation | None:
    return expectation_from_json(stored.read_text()) if stored else None


def _expected_of(planned: Planned) -> Expectation | None:
    # By the plan, not by what is stored: a weight that should be quantized and is whole is not expected whole.
    expected = _expected(planned.expected)
    return expect_stored(expected, _planned_release(planned, None)) if expected and planned.is_quantized else expected


def _planned_release(planned: Planned, assets: Path | None) -> Release:
    plan = plan_from_json((planned.whole if planned.is_gguf else planned.path).read_text())
    files = tuple(
        WeightFile(
            file.name,
            file.nbytes,
            file.header_nbytes,
            tuple(
                StoredTensor(t.name, file.name, t.dtype, t.shape, t.span[0] - file.header_nbytes, t.span[1] - file.header_nbytes)
                for t in file.tensors
            ),
            {"format": "pt"},
        )
        for file in plan.files
    )
    config = json.loads(planned.config.read_text(encoding="utf-8")) if planned.config else {}
    generation_config = read_config(assets, "generation_config.json")
    return Release(None, files, config=config, generation_config=generation_config, assets=assets)


def read_statistics(path: Path) -> tuple[TensorStatistics, ...]:
    """Return a TensorTable's rows for the report.

    Args:
        path: the table.

    Returns:
        One per released tensor.
    """
    names = [f.name for f in fields(TensorStatistics)]
    return tuple(TensorStatistics(*row) for row in read_table(TensorTable, path)[names].itertuples(index=False, name=None))


def read_encoded(planned: Planned, measured: Measured) -> tuple[EncodedWeight, ...]:
    """Return a release's quantized weights for the report.

    Args:
        planned: the plan.
        measured: the tables of the release.

    Returns:
        One per quantized weight, in the order stored.
    """
    if not (planned.is_quantized or planned.is_gguf):
        return ()
    of_gguf = measured.gguf  # of weights in parts, only the part with the values has an error
    table = read_table(GgufTable, of_gguf) if of_gguf else read_table(PartTable, measured.parts)
    errors = dict(zip(table["name"], table["relative_error"], strict=True))
    by_weight: dict[str, list[TensorPlan]] = {}
    for _, tensor in plan_from_json(planned.path.read_text()).tensors():
        if tensor.part is not None:
            by_weight.setdefault(tensor.part.weight, []).append(tensor)
    return tuple(
        EncodedWeight(
            weight,
            held[0].encoding,
            sum(part.spec.nbytes for part in held),
            sum(prod(box.shape) * ITEMSIZE[box.dtype] for box in held[0].inputs),
            next((error for part in held if not math.isnan(error := float(errors.get(part.name, math.nan)))), math.nan),
        )
        for weight, held in by_weight.items()
    )
