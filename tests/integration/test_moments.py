"""What is made of a checkpoint says at which step and after how many tokens: its report, a release's manifest, the history of drills."""

import json
import shutil
from pathlib import Path

import pytest

from flows.drill_requests import DrillRequest
from flows.export import run_export
from flows.gate import run_gate
from flows.ledger import LedgerRequest, make_ledger
from flows.recording import print_history
from flows.requests import ExportRequest, GateRequest
from flows.restore_drill import run_drill
from flows.run import PlainRunner, Silent
from reports.moment import Moment
from tests.builders.released import GOLDEN

STEP, TOKENS = 3, 288  # recorded by the trainer: four ranks, three steps of two rows of twelve tokens
MADE = Moment(STEP, TOKENS)
SKIPPED = ["logits=not of this test"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A run with one save, which was drilled; and its release, which was held against it."""
    folder = tmp_path_factory.mktemp("moments")
    case, runs, save = GOLDEN / "fsdp2_w4_llama_tied_bf16", folder / "runs", folder / "run" / "step-3"
    shutil.copytree(case / "ckpt", save)
    request = ExportRequest(source=save, to=folder / "release", assets=case / "hf", runs=runs, skip=SKIPPED)
    made = [run_export(request, PlainRunner(), Silent())]
    made.append(run_gate(GateRequest(release=folder / "release", against=save, runs=runs, skip=SKIPPED), PlainRunner()))
    made.append(run_drill(DrillRequest(root=folder / "run", runs=runs, level="D1"), PlainRunner()))
    assert [outcome.report.moment for outcome in made] == [MADE] * 3
    return folder


def test_a_release_says_of_which_moment_it_is(base):
    source = json.loads((base / "release" / "shardwright.json").read_text())["source"]
    assert (source["step"], source["consumed_tokens"]) == (STEP, TOKENS)


def test_a_gate_of_a_release_alone_takes_it_from_the_manifest(base, tmp_path):
    request = GateRequest(release=base / "release", runs=tmp_path, skip=SKIPPED)
    assert run_gate(request, PlainRunner()).report.moment == MADE


def test_the_history_of_drills_says_it(base, capsys):
    print_history(base / "runs", base / "run", as_json=False)
    assert "D1  step 3, 288 tokens  green" in capsys.readouterr().out


def test_the_ledger_lines_up_by_it(base, tmp_path):
    made = make_ledger(LedgerRequest(root=base / "run", runs=base / "runs"))
    assert {event.kind: event.tokens for event in made.rows[0].events} == {"export": TOKENS, "gate": TOKENS, "drill": TOKENS}
    assert made.report.verdict().green
