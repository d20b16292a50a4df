"""README.md does what it says: its commands are the real command line's, its paths exist, its tables are the code's."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from flows.cli import app
from tasks.engine.families.families import FAMILIES
from tasks.engine.formats.readers import READERS
from tests.benchmarks.export import LIMITS
from tests.builders.editing import set_fields
from tests.builders.releases import build_release
from tests.faults.table import PAGE as FAULTS_PAGE
from validators.policy_file import default_policy_text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROOMS = ("flows", "tasks", "validators", "reports", "tests", "docs")
_BLOCKS = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
_SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
_OPTION_ROWS = re.findall(r"^\| (`--.*?) \|", README, re.MULTILINE)
# Where a line of the summary differs between two runs of one command.
_VARYING = (
    (r"export-\d{8}-\d{6}-[0-9a-f]{6}", "<run>"),
    (r"(?<= )(?:/|…/)\S*?(?=(demo|runs|release)\b)", "…/"),
    (r"\d+(\.\d+)?e-\d+", "<n>"),
)


def commands() -> list[str]:
    """Every `shardwright …` command shown, without prompt and folder."""
    lines = [line.removeprefix("$ ").removeprefix("      - run: ") for block in _BLOCKS for line in block.splitlines()] + _SPANS
    return [re.sub(r"^\.venv/bin/", "", line) for line in lines if re.match(r"(\.venv/bin/)?shardwright ", line)]


def table(first: str) -> list[list[str]]:
    """The cells of the table whose header begins with these cells."""
    rows = README[README.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if not row.startswith("|---")]


def same_in_every_run(text: str) -> list[str]:
    """The lines of a summary, what varies between runs taken out."""
    for pattern, name in _VARYING:
        text = re.sub(pattern, name, text)
    return text.strip().splitlines()


def test_commands_are_shown():
    assert {command.split()[1] for command in commands()} >= {"export", "gate", "inspect", "plan", "policy", "serve"}


@pytest.mark.parametrize("command", commands())
def test_a_command_shown_is_understood_by_the_command_line(command):
    _, name, *arguments = shlex.split(command)
    group = typer.main.get_command(app)
    known = group.commands[name]
    while hasattr(known, "commands"):  # a group, such as `policy`
        known, arguments = known.commands[arguments[0]], arguments[1:]
    if "--help" not in arguments:
        known.make_context(name, arguments)
    with pytest.raises(typer.TyperException):
        known.make_context(name, [*arguments, "--no-such-option"])


@pytest.mark.parametrize("row", _OPTION_ROWS)
def test_an_option_described_exists(row):
    export = typer.main.get_command(app).commands["export"]
    options = {option for parameter in export.params for option in parameter.opts}
    for shown in re.findall(r"`(--[a-z-]+)", row):
        assert shown in options


def test_paths_named_exist():
    named = {span for span in _SPANS if re.match(rf"({'|'.join(ROOMS)})/[\w./-]+$", span)}
    named |= {link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link}
    assert len(named) > 15
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_formats_and_families_are_the_codes():
    formats, families = [reader.name for reader in READERS], [family.name for family in FAMILIES]
    matrix = table("format | llama")
    assert matrix[0] == ["format", *families]
    assert [row[0] for row in matrix[1:]] == formats
    assert [row[0] for row in table("format | written by")[1:]] == formats
    assert [(row[0], row[1]) for row in table("family | model types")[1:]] == [(f.name, ", ".join(f.model_types)) for f in FAMILIES]


def test_performance_rows_are_the_benchmarks():
    assert [(row[0], row[1]) for row in table("measure | allowed")[1:]] == [
        (name, f"{limit} \N{MULTIPLICATION SIGN} cp") for name, limit in LIMITS.items()
    ]


def test_the_page_of_faults_is_linked():
    assert f"]({FAULTS_PAGE.relative_to(ROOT)})" in README


@pytest.fixture
def workplace(tmp_path, command_line):
    """A folder with a release, its assets, a policy, and on the path `shardwright` and an `hf` that notes what it is asked."""
    build_release("dense", tmp_path / "release")
    shutil.copytree(tmp_path / "release", tmp_path / "assets", ignore=shutil.ignore_patterns("*.safetensors*"))
    (tmp_path / "policy.yaml").write_text(default_policy_text())
    (tmp_path / "bin").mkdir()
    command_line.write_program(tmp_path / "bin/shardwright")
    (tmp_path / "bin/hf").write_text('#!/bin/sh\necho "$@" >> uploaded\n')
    (tmp_path / "bin/hf").chmod(0o755)
    return tmp_path


def run_in(workplace: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a CI service would."""
    path = {"PATH": f"{workplace / 'bin'}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": str(workplace / "summary.md")}
    return subprocess.run(command, cwd=workplace, env=os.environ | path, capture_output=True, text=True, timeout=500, check=False)


def block_of(first: str) -> str:
    """The block whose first line begins so."""
    (found,) = [block for block in _BLOCKS if block.startswith(first)]
    return found


def damage(workplace: Path) -> None:
    """Give the release another epsilon than its assets."""
    set_fields(workplace / "release/config.json", rms_norm_eps=1e-5)


def test_the_workflow_shown_accepts_a_sound_release_and_stops_at_its_first_step_for_another(workplace):
    steps = [step["run"] for step in yaml.safe_load(block_of("# .github/workflows/gate.yml"))["jobs"]["gate"]["steps"] if "run" in step]
    assert len(steps) == 2
    for step in steps:
        ended = run_in(workplace, "bash", "-e", "-c", step)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sensitivity" in (workplace / "report/report.md").read_text()
    assert (workplace / "gate.xml").is_file()
    assert (workplace / "summary.md").read_text().count("accepted") >= 2
    damage(workplace)
    assert run_in(workplace, "bash", "-e", "-c", steps[0]).returncode == 1


def test_the_script_shown_uploads_only_what_was_accepted(workplace):
    (workplace / "publish.sh").write_text(block_of("# publish.sh"))
    publish = ("sh", "publish.sh", "release", "acme/model")
    ended = run_in(workplace, *publish)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (workplace / "uploaded").read_text() == "upload acme/model release\n"
    (workplace / "uploaded").unlink()
    damage(workplace)
    assert run_in(workplace, *publish).returncode == 1
    assert not (workplace / "uploaded").exists()


def test_make_demo_is_the_first_command_and_prints_what_is_shown(tmp_path):
    first = _BLOCKS[0]
    assert first.startswith("$ make demo\n")
    recipe = re.search(r"^demo:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    console, *arguments = recipe[1].split()
    assert console == "$(BIN)/shardwright"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flows.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    assert same_in_every_run(ended.stdout) == same_in_every_run(first.removeprefix("$ make demo\n"))
    assert Path(ended.stdout.split()[-1]).is_file()
