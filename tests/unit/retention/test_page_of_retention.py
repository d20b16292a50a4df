"""docs/retention.md does what it says: its policy, its log line and its result are read, its commands are the command line's."""

import json
import re
from pathlib import Path

import typer

from flows.cli import app
from validators.retention.evaluations import read_evaluations
from validators.retention.policy import PinRow, RetentionPolicy, SpikeRule, read_retention_policy
from validators.retention.training_log import read_training_log

PAGE = (Path(__file__).parents[3] / "docs/retention.md").read_text(encoding="utf-8")
_JSON = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def test_the_policy_shown_is_read_and_names_every_rule(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "retain.yaml").write_text(text)
    policy = read_retention_policy(tmp_path / "retain.yaml")
    assert policy.spikes == SpikeRule()
    assert policy.pins[0].step == 31000
    named = set(re.findall(r"^[ -]*(\w+):", text, re.MULTILINE))
    assert named == {name for kind in (RetentionPolicy, PinRow, SpikeRule) for name in kind.model_fields}


def test_the_log_line_shown_is_read(tmp_path):
    (tmp_path / "train.jsonl").write_text(_JSON[0])
    (line,) = read_training_log(tmp_path / "train.jsonl")
    assert (line.step, line.loss, line.consumed, line.data) == (3001, 2.31, 12292096, "web-2")


def test_the_result_shown_is_read(tmp_path):
    (tmp_path / "result.json").write_text(_JSON[1])
    (one,) = read_evaluations([tmp_path])
    assert (one.step, one.tokens, one.data, dict(one.results)) == (3000, 12288000, "web-2", {"arc/acc": 0.41})
    assert json.loads(_JSON[1])["results"] == {"arc/acc": 0.41}


def test_the_commands_shown_are_the_command_lines():
    known = typer.main.get_command(app).commands
    for line in re.findall(r"^shardwright (.*)$", PAGE, re.MULTILINE):
        name, *words = line.split()
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
