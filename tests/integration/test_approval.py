"""Approval before publish: nothing but a plain yes publishes, and the report says who decided."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flows.approval import ASKING, ask_at_terminal
from flows.export import NotPublishedError, run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from tests.builders.hf import write_shards
from tests.integration.line import beside, request_for
from validators.approval import Answer

ROOT = Path(__file__).parents[2]
COMMAND = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flows.cli import main; main()"


@pytest.fixture
def source(tmp_path):
    write_shards(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


@pytest.fixture
def answering():
    """Answers every question with one answer, after something else was done, and notes what was asked."""
    asked = []

    def set_answer(answer, meanwhile=lambda: None):
        def ask(outcome, seconds):
            asked.append((outcome, seconds))
            meanwhile()
            return answer

        ASKING.set(ask)
        return asked

    before = ASKING.get()
    yield set_answer
    ASKING.set(before)


def test_a_yes_publishes_and_stands_in_the_report(source, base, answering):
    asked = answering(Answer("approve", "Ada", "evaluations look right"))
    outcome = run_export(ExportRequest(**request_for(source, base, approve=True, approve_within=5)), PlainRunner(), Silent())
    assert (base / "out/shardwright.committed").is_file()
    assert [seconds for _, seconds in asked] == [5]
    assert any("Ada: evaluations look right" in note for note in outcome.report.notes)
    assert {r.check: r.status for r in outcome.report.results}["approval"] == "passed"


@pytest.mark.parametrize(
    ("answer", "code", "word"),
    [
        (Answer("reject", "Ada", "loss spike at 3000"), "approval.rejected", "Ada: loss spike at 3000"),
        (Answer("reject"), "approval.rejected", "gave no name"),
        (Answer("unanswered", seconds=5), "approval.unanswered", "5 s"),
    ],
)
def test_anything_else_leaves_nothing_behind(source, base, answering, answer, code, word):
    answering(answer)
    with pytest.raises(NotPublishedError) as red:
        run_export(ExportRequest(**request_for(source, base, approve=True)), PlainRunner(), Silent())
    assert beside(base) == set()
    assert not red.value.outcome.verdict.green
    found = [f for r in red.value.outcome.report.results for f in r.findings if f.code == code]
    assert [word in f.found for f in found] == [True]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stage: _flip_last_bit(stage / "model.safetensors"), "model.safetensors"),
        (lambda stage: (stage / "extra.bin").write_bytes(b"x"), "extra.bin"),
        (lambda stage: (stage / "README.md").unlink(), "README.md"),
        (lambda stage: _replace_by_link(stage / "model.safetensors"), "model.safetensors"),
    ],
)
def test_a_yes_is_to_what_was_checked(source, base, answering, change, named):
    def meanwhile():
        (stage,) = base.glob(".out.shardwright-*/")
        change(stage)

    answering(Answer("approve", "Ada"), meanwhile)
    with pytest.raises(NotPublishedError) as red:
        run_export(ExportRequest(**request_for(source, base, approve=True)), PlainRunner(), Silent())
    assert beside(base) == set()
    found = [f for r in red.value.outcome.report.results for f in r.findings]
    assert [(f.code, f.where) for f in found] == [("approval.changed", named)]


def _flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _replace_by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[2] / "moved.safetensors"))


def test_nobody_is_asked_about_what_the_checks_refuse(source, base, answering):
    asked = answering(Answer("approve"))
    damaged = source / "model-00001-of-00002.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(damaged).items()}, damaged, {"format": "pt"})
    with pytest.raises(NotPublishedError):
        run_export(ExportRequest(**request_for(source, base, approve=True)), PlainRunner(), Silent())
    assert asked == []


def _command(source: Path, base: Path, *more: str) -> list[str]:
    asked = [
        "export",
        str(source),
        "--to",
        str(base / "out"),
        "--family",
        "none",
        "--skip",
        "logits=no model",
        "--runs",
        str(base / "runs"),
    ]
    return [sys.executable, "-c", COMMAND, *asked, *more]


def _environment(base: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"} | {"PREFECT_HOME": str(base / "home")}


def test_without_anybody_to_ask_it_is_refused_at_once(source, base):
    done = subprocess.run(
        _command(source, base, "--approve"), env=_environment(base), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, (base / "out").exists()) == (2, False)
    assert "--approve: has nobody to ask" in done.stderr


_TYPED = [(b"yes\n", "approve"), (b"no\n", "reject"), (b"maybe\nyes\n", "approve"), (b"y\n\n", "unanswered"), (b"", "unanswered")]


@pytest.mark.parametrize(("typed", "decision"), _TYPED)
def test_only_yes_is_a_yes_at_the_terminal(source, base, monkeypatch, capsys, typed, decision):
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    outcome = run_export(ExportRequest(**request_for(source, base)), PlainRunner(), Silent())
    with open(theirs, closefd=False) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        answer = ask_at_terminal(outcome, 2 if decision == "unanswered" else 60)
    assert answer.decision == decision
    told = capsys.readouterr().err
    assert told.count("yes or no, within") == (typed.count(b"\n") or 1) + (typed == b"y\n\n")
    assert "ready to be published" in told


@pytest.mark.slow
def test_the_command_asks_its_terminal(source, base):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        _command(source, base, "--approve"), env=_environment(base), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.write(ours, b"no, wait\nno\n")
    shown, asked = process.communicate(timeout=600)
    assert process.returncode == 1, asked.decode()
    assert asked.count(b"yes or no, within") == 2
    assert b"answered 'no'" in shown
    assert beside(base) - {"home"} == set()
