"""What a planted fault is, and how its evidence is gathered: a copy of a sound release, damaged, measured against the sound one."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import transformers

from reports.model import CheckResult, Report
from tasks.measure import measure
from tasks.measure_copies import measure_copies
from tests.builders.measuring import compare_logits, plan_of
from tests.builders.plans import whole, write_plan
from tests.builders.releases import SoundRelease
from validators.check import Check, run
from validators.checks import CHECKS, CHECKS_OF_EXPORT, CHECKS_OF_GATE
from validators.expectation import Evidence, Reference
from validators.quantized_names import expect_stored
from validators.release import open_release
from validators.tables import parse_shape


@dataclass(frozen=True)
class Fault:
    """One way a release is wrong, and the code that must say so.

    `base` is a key of tests.builders.releases.MODELS. `plant` damages the release folder. `prepare` shapes the source first, and what
    follows is honest of it. `amend` changes the gathered evidence, for faults that lie in a plan or a comparison. `dtype` is the dtype
    requested; `logits` the row of limits to compare logits at, "" for none. `review` holds the report against a policy, for faults that
    lie in it. `retrained` takes the source for an earlier release, with other weights. `damage` changes the DeepSpeed save.
    """

    name: str
    base: str
    code: str
    plant: Callable[[Path], None]
    prepare: Callable[[Path], None] | None = None
    amend: Callable[[Evidence], Evidence] | None = None
    dtype: str = ""
    logits: str = ""
    review: Callable[[Report], Report] | None = None
    retrained: bool = False
    damage: Callable[[Path], None] | None = None


def gather(folder: Path, source: Path, sound: SoundRelease, *, dtype: str = "", logits: str = "", retrained: bool = False) -> Evidence:
    """Return all evidence of a release in `folder` that was exported from `source`, measured as the product measures.

    The source is the reference of config and tokenizer too, and an earlier release where the folder was `retrained`. Where the sound
    release has a DeepSpeed save, the values are held against that.
    """
    release = open_release(folder)
    files = [folder / file.name for file in release.files] if release.manifest else []
    plan = plan_of(source, dtype, sound.expected.keep_fp32)
    rows = plan[["name", "shape", "dtype"]].itertuples(index=False)
    targets = [whole(row.name, parse_shape(row.shape), row.dtype, source=sound.name_in_save(row.name)) for row in rows]
    root = sound.save or source
    plan_path = write_plan(folder.parent / f"{folder.name}.plan.json", "zero" if sound.save else "hf", root, targets)
    measured = measure(folder, plan_path=plan_path, source_roots=(root,), workers=1)
    copies, _ = measure_copies(folder, plan_path=plan_path, source_roots=(root,), workers=1)
    return Evidence(
        release,
        expect_stored(sound.expected, release),
        plan=plan,
        tensors=measured.tensors,
        values=pd.concat([measured.values, copies], ignore_index=True) if len(copies) else measured.values,
        parts=measured.parts,
        logits=(compare_logits(folder, source, logits, sound.ranks),) if logits else (),
        dtype=dtype,
        reference=refer_to(source, retrained=retrained),
        digests={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    )


def refer_to(folder: Path, *, retrained: bool = False) -> Reference:
    """Return a folder as a reference."""
    paths = [folder / name for name in ("config.json", "generation_config.json")]
    config, generation = (json.loads(path.read_text()) if path.is_file() else {} for path in paths)
    defaults = transformers.CONFIG_MAPPING[config["model_type"]]().to_dict()
    return Reference(
        folder, config, generation, defaults, measure(folder, plan_path=None, source_roots=(), workers=1).tensors if retrained else None
    )


def plant_and_gather(fault: Fault, sound: SoundRelease, scratch: Path) -> Evidence:
    """Plant a fault in a copy of a sound release and return all evidence of it."""
    source, made, folder = sound.source or sound.folder, sound.folder, scratch / "release"
    if fault.prepare:
        source = made = scratch / "source"
        shutil.copytree(sound.folder, source)
        fault.prepare(source)
    shutil.copytree(made, folder)
    fault.plant(folder)
    if fault.damage and sound.save:
        sound = replace(sound, save=Path(shutil.copytree(sound.save, scratch / "save")))
        fault.damage(sound.save)
    evidence = gather(folder, source, sound, dtype=fault.dtype, logits=fault.logits, retrained=fault.retrained)
    return fault.amend(evidence) if fault.amend else evidence


def report_of(results: list[CheckResult], evidence: Evidence) -> Report:
    """Return the report of a gate that found `results`."""
    return Report(
        **{"run_id": "gate-1", "kind": "gate", "action": "accepted", "subject": "release", "source": "none given", "plan_digest": ""},
        **{"environment": {}, "started": "2026-11-29T16:04:11+00:00", "finished": "2026-11-29T16:04:12+00:00"},
        results=tuple(results),
        witnesses=evidence.witnesses,
        logits=evidence.logits,
    )


def judge_all(evidence: Evidence, checks: tuple[Check, ...] = CHECKS_OF_EXPORT) -> list[CheckResult]:
    """Return what every check says; the clock stands still."""
    return [run(check, evidence, lambda: 0.0) for check in checks]


def checks_for(fault: Fault) -> tuple[Check, ...]:
    """Return the checks a fault is shown to: the gate's own, slow to run, only where they must catch it."""
    own = {fault.code.split(".")[0]} & CHECKS_OF_GATE
    return tuple(check for check in CHECKS if check in CHECKS_OF_EXPORT or check.name in own)


def judge(fault: Fault, evidence: Evidence) -> list[CheckResult]:
    """Return what the checks say of a planted fault, held against the fault's policy if it has one."""
    results = judge_all(evidence, checks_for(fault))
    return list(fault.review(report_of(results, evidence)).results) if fault.review else results
