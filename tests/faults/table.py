"""The table of planted faults, docs/faults.md.

python -m tests.faults.table
"""

from pathlib import Path

from reports.codes import CODES
from tests.faults.faults_in_checkpoints import FAULTS as IN_CHECKPOINTS
from tests.faults.faults_in_gguf import FAULTS as IN_GGUF
from tests.faults.faults_in_ledger import FAULTS as IN_LEDGER
from tests.faults.faults_in_ranks import FAULTS as IN_RANKS
from tests.faults.faults_in_resume import RESTORES, RESUMES
from tests.faults.faults_in_retention import FAULTS as IN_RETENTION
from tests.faults.planted import FAULTS

PAGE = Path(__file__).parents[2] / "docs/faults.md"
HEAD = """# Finding codes, and the faults planted to prove them

Written by `python -m tests.faults.table`; a test holds it current. Each fault is planted into a sound release of a tiny model, or into the
checkpoints of a sound training run, and must be caught by its code, and by no crash (`tests/faults`). Sound releases and runs, honest casts
and other controls must pass without a word. A warning never turns a verdict.
"""


def render() -> str:
    """The page."""
    planted: dict[str, list[str]] = {}
    for fault in (*FAULTS, *IN_RANKS, *IN_CHECKPOINTS, *RESUMES, *RESTORES, *IN_RETENTION, *IN_LEDGER, *IN_GGUF):
        planted.setdefault(fault.code, []).append(fault.name.replace("_", " "))
    lines, check = [HEAD], ""
    for code, row in CODES.items():
        if code.split(".")[0] != check:
            check = code.split(".")[0]
            lines += [f"## {check}", "", "| code | severity | meaning | what to do | planted faults |", "|---|---|---|---|---|"]
        faults = ", ".join(sorted(planted.get(code, [])))
        lines.append(f"| `{code}` | {row.severity} | {row.meaning} | {row.remedy} | {faults} |")
        if code == _last_of(check):
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _last_of(check: str) -> str:
    return [code for code in CODES if code.startswith(f"{check}.")][-1]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
