"""What it takes to see each planted fault, docs/faults-by-evidence.md.

python -m tests.faults.evidence
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from reports.codes import CODES
from tests.builders.quantized import build_all
from tests.builders.releases import SoundRelease
from tests.faults.planting import Fault, checks_for, judge_all, plant_and_gather
from validators.expectation import Evidence

PAGE = Path(__file__).parents[2] / "docs/faults-by-evidence.md"
HEAD = """# What it takes to see each planted fault

Written by `make faults`; `tests/faults/test_faults.py` holds every row. A fault is planted into a sound release, and the checks are run
five times: on the folder's bytes alone (and what its config says of quantization, without which they mean nothing); with its config and
tokenizer; with those of a reference beside them (the trainer's, or an earlier release); against the values of the source; and on logits,
without the source. **yes**: an error turned the verdict (or, for a fault that is only warned of, the warning came).
"""


def _without_reference(evidence: Evidence) -> Evidence:
    parts = None if evidence.parts is None else evidence.parts.assign(relative_error=float("nan"), rounding=float("nan"))
    return replace(evidence, plan=None, values=None, logits=(), parts=parts, reference=None)


def _bytes_alone(evidence: Evidence) -> Evidence:
    said = {name: value for name, value in evidence.release.config.items() if name == "quantization_config"}
    meant = {**evidence.release.manifest, "family": "none"}  # that there is no config is not the fault looked for
    release = replace(evidence.release, config=said, generation_config={}, assets=None, manifest=meant)
    return replace(_without_reference(evidence), release=release, expected=None)


LEVELS: Mapping[str, Callable[[Evidence], Evidence]] = {
    "bytes alone": _bytes_alone,
    "config and tokenizer": _without_reference,
    "a reference's": lambda evidence: replace(_without_reference(evidence), reference=evidence.reference),
    "source's values": lambda evidence: replace(evidence, logits=(), reference=None),
    "logits": lambda evidence: replace(_without_reference(evidence), logits=evidence.logits),
}


def levels_of(fault: Fault, evidence: Evidence) -> dict[str, bool]:
    """Which evidence shows a fault."""
    return {name: _is_seen(fault, limit(evidence)) for name, limit in LEVELS.items()}


def _is_seen(fault: Fault, evidence: Evidence) -> bool:
    has_config = bool(evidence.release.config.keys() - {"quantization_config"})
    checks = tuple(check for check in checks_for(fault) if has_config or check.name != "config")
    findings = [finding for result in judge_all(evidence, checks) for finding in result.findings]
    wanted = CODES[fault.code].severity
    return any(f.code == fault.code if wanted != "error" else f.severity == "error" for f in findings)


def row_of(fault: Fault, seen: Mapping[str, bool]) -> str:
    """A fault's row of the page."""
    cells = ["yes" if seen[name] else "" for name in LEVELS]
    if not fault.logits:
        cells[-1] = "not compared"
    return f"| {fault.name.replace('_', ' ')} | {fault.base} | `{fault.code}` | {' | '.join(cells)} |"


def render(faults: tuple[Fault, ...]) -> str:
    """The page; plants every fault."""
    columns = ["fault", "model", "code", *LEVELS]
    lines = [HEAD, f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    with tempfile.TemporaryDirectory() as scratch:
        sound = build_all(Path(scratch))
        lines += list(_rows(faults, sound, Path(scratch)))
    return "\n".join(lines) + "\n"


def _rows(faults: tuple[Fault, ...], sound: Mapping[str, SoundRelease], scratch: Path) -> Iterator[str]:
    shown = [fault for fault in faults if fault.review is None]  # a policy's findings are of the report, not of the release
    for number, fault in enumerate(sorted(shown, key=lambda fault: (fault.base, fault.code, fault.name))):
        place = scratch / str(number)
        place.mkdir()
        yield row_of(fault, levels_of(fault, plant_and_gather(fault, sound[fault.base], place)))


if __name__ == "__main__":
    from tests.faults.planted import FAULTS

    PAGE.write_text(render(FAULTS), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
