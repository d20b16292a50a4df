"""docs/drills.md does what it says: its goals and its log line are read, its trainer is the protocol, its levels are the code's."""

import inspect
import json
import re
from pathlib import Path

from tasks.restoring.resume import Training
from tests.builders.trainer import Run
from validators.drills.check import LEVELS
from validators.drills.goals import Goals
from validators.drills.log import read_goals, read_log

PAGE = (Path(__file__).parents[3] / "docs/drills.md").read_text(encoding="utf-8")


def _block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def test_the_goals_shown_are_read(tmp_path):
    (tmp_path / "drill.yaml").write_text(_block("yaml"))
    goals = read_goals(tmp_path / "drill.yaml")
    assert (goals.rto_seconds, goals.declared.keep) == (600, 5)
    named = set(re.findall(r"^ *(\w+):", _block("yaml"), re.MULTILINE)) | {"rpo_steps", "rpo_tokens"}
    assert named == set(Goals.__dataclass_fields__) | set(type(goals.declared).__dataclass_fields__)


def test_the_log_line_shown_is_read(tmp_path):
    (tmp_path / "log").write_text(_block("json"))
    (step,) = read_log(tmp_path / "log")
    assert (step.step, step.loss, step.lr) == (3001, 2.31, (0.0003, 0.0003))
    assert set(json.loads(_block("json"))) == set(type(step).__dataclass_fields__)


def test_the_trainer_shown_is_the_protocol():
    shown = set(re.findall(r"def (\w+)\(self", _block("python")))
    asked = {name for name, _ in inspect.getmembers(Training, inspect.isfunction) if not name.startswith("_")}
    assert shown == asked
    assert all(hasattr(Run, name) for name in asked)


def test_the_levels_shown_are_the_codes():
    assert tuple(re.findall(r"^\| (D\d) \|", PAGE, re.MULTILINE)) == LEVELS
