"""The command line's own words: usage errors, request files, what a closed pipe does. No flow runs here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows import cli
from tasks.engine.families.families import FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def asked(monkeypatch):
    """What the command line would have exported."""
    requests = []
    monkeypatch.setattr(cli, "_run_export", lambda request, as_json: requests.append(request) or 0)
    return requests


def run(monkeypatch, *arguments):
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["shardwright", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "a", "--nope"], "--nope"),
        (["frobnicate"], "frobnicate"),
        (["export", "a", "--to", "b", "--workers", "x"], "--workers"),
        (["export", "a", "--to", "b", "--workers", "0"], "--workers"),
        (["export", "a", "--to", "b", "--dtype", "int8"], "--dtype"),
        (["export", "a", "--to", "b", "--max-file", "5 cats"], "--max-file"),
        (["export", "a", "--to", "b", "--drop", "x"], "NAME=REASON"),
        (["export", "a", "--to", "b", "--quantize", ""], "--quantize: is blank"),
        (["plan", "a", "--gguf", ""], "--gguf: is blank"),
        (["export", "a"], "--to: is missing"),
        (["export"], "SOURCE: is missing"),
        (["plan"], "source"),
        (["export", "--clean"], "--to: is missing"),
    ],
)
def test_a_usage_error_is_one_sentence_and_exit_2(arguments, words, asked, monkeypatch, capsys):
    assert run(monkeypatch, *arguments) == cli.REFUSED
    message = capsys.readouterr().err
    assert message.startswith("shardwright: ")
    assert words in message
    assert asked == []


def test_no_command_prints_the_help(monkeypatch, capsys):
    assert run(monkeypatch) == cli.GREEN
    assert "inspect" in capsys.readouterr().out


def test_a_request_file_gives_what_the_command_line_does_not(asked, tmp_path, monkeypatch):
    file = tmp_path / "request.yaml"
    file.write_text("source: a\nto: b\ndtype: bf16\nmax_file: 1GB\nfsync: true\nruns: here\n")
    assert run(monkeypatch, "export", "--request", file, "--dtype", "fp32", "--no-fsync", "--to", "c") == cli.GREEN
    (request,) = asked
    assert (request.source, request.to, request.dtype, request.max_file, request.fsync, request.runs) == (
        Path("a"),
        Path("c"),
        "fp32",
        10**9,
        False,
        Path("here"),
    )


def test_runs_of_the_environment_give_way_to_a_request_files(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_RUNS", "elsewhere")
    file = tmp_path / "request.yaml"
    file.write_text("source: a\nto: b\n")
    run(monkeypatch, "export", "--request", file)
    file.write_text("source: a\nto: b\nruns: here\n")
    run(monkeypatch, "export", "--request", file)
    assert [request.runs for request in asked] == [Path("elsewhere"), Path("here")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [\n", "is not YAML"),
        (b"\xff\xfe", "is not YAML"),
        (b"- a\n", "is not a mapping"),
        (b"source: a\n", "--to"),
        (b"source: a\nto: b\nbogus: 1\n", "--bogus"),
    ],
)
def test_a_request_file_that_cannot_be_one_is_refused(content, words, asked, tmp_path, monkeypatch, capsys):
    file = tmp_path / "request.yaml"
    file.write_bytes(content)
    assert run(monkeypatch, "export", "--request", file) == cli.REFUSED
    assert words in capsys.readouterr().err
    assert asked == []


@pytest.mark.parametrize("more", [["--json"], []])
def test_a_reader_that_leaves_changes_no_exit_code(more):
    golden = ROOT / "tests/golden/accelerate_llama/ckpt"
    command = [sys.executable, "-m", "flows.cli", "inspect", str(golden), *more]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (cli.GREEN, "")


def test_a_closed_standard_output_is_no_error():
    golden = ROOT / "tests/golden/accelerate_llama/ckpt"
    command = f'exec "{sys.executable}" -m flows.cli inspect "{golden}" >&-'
    ended = subprocess.run(["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (cli.GREEN, "")


def test_inspect_lists_every_tensor_for_machines(monkeypatch, capsys):
    assert run(monkeypatch, "inspect", ROOT / "tests/golden/accelerate_llama/ckpt", "--json") == cli.GREEN
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 21


def test_what_a_terminal_cannot_show_is_spelled():
    golden = ROOT / "tests/golden/accelerate_llama/ckpt"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "flows.cli", "inspect", str(golden)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (cli.GREEN, "")
    assert r"\u2026 and 9 more" in ended.stdout


def test_the_help_names_every_family(monkeypatch, capsys):
    assert run(monkeypatch, "export", "--help") == cli.GREEN
    words = capsys.readouterr().out.replace(",", " ").replace(".", " ").split()
    assert [family.name for family in FAMILIES if family.name not in words] == []
