"""The real command line, in processes of its own: exit codes, what it prints and where, and that no refusal shows a traceback."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.builders.cases import find_case
from tests.builders.hf import write_shards
from tests.builders.wholeness import is_whole
from tests.integration.line import NO_FORWARD, beside

PROGRAM = [sys.executable, "-c", "from flows.cli import main; main()"]
SKIP = ["--skip", NO_FORWARD[0]]


def run(*arguments: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command from any folder; a traceback is never right."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    done = subprocess.run([*PROGRAM, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


@pytest.fixture
def source(tmp_path):
    write_shards(tmp_path / "source")
    return tmp_path / "source"


def test_help_is_quick_and_imports_neither_torch_nor_prefect():
    command = [sys.executable, "-X", "importtime", *PROGRAM[1:], "--help"]
    imported = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    names = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in imported.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in names
    assert not names & {"torch", "prefect", "transformers", "pandas", "numpy", "great_expectations"}
    assert all(command in imported.stdout for command in ("export", "gate", "plan", "inspect", "demo"))
    seconds = []
    for _ in range(5):
        begun = time.monotonic()
        run("--help")
        seconds.append(time.monotonic() - begun)
    assert statistics.median(seconds) < 2  # 0.7 on an idle machine


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "{base}/nowhere", "--to", "{base}/out"], ["nowhere"]),
        (["export", "{base}/notes", "--to", "{base}/out"], ["dcp:", "hf:"]),
        (["export", "{base}/source"], ["--to", "is missing"]),
        (["export", "--to", "{base}/out"], ["SOURCE", "is missing"]),
        (["export", "{base}/source", "--to", "{base}/out"], ["--assets", "--family none"]),
        (["export", "{base}/source", "--to", "{base}/source/out", "--family", "none"], ["--to", "inside the checkpoint"]),
        (["export", "{base}/source", "--to", "{base}/notes", "--family", "none"], ["exists already", "--to"]),
        (["export", "{base}/source", "--to", "{base}/out", "--dtype", "int8"], ["--dtype"]),
        (["export", "{base}/source", "--to", "{base}/out", "--max-file", "huge"], ["--max-file", "5GB"]),
        (["export", "{base}/source", "--to", "{base}/out", "--drop", "norm"], ["--drop", "NAME=REASON"]),
        (["export", "{base}/source", "--to", "{base}/out", "--skip", "colour=no"], ["--skip", "colour"]),
        (["export", "{base}/source", "--to", "{base}/out", "--assets", "{base}/none"], ["--assets", "does not exist"]),
        (["export", "--request", "{base}/none.yaml"], ["none.yaml"]),
        (["export", "--request", "{base}/latin1.yaml"], ["latin1.yaml"]),
        (["export", "--request", "{base}/list.yaml"], ["list.yaml", "mapping"]),
        (["export", "--request", "{base}/typo.yaml", "--to", "{base}/out"], ["--dtyp"]),
        (["export", "{base}/source", "--to", "{base}/out", "--assets", "{base}/broken"], ["generation_config.json"]),
        (["gate", "{base}/nowhere"], ["nowhere", "does not exist"]),
        (["gate", "{base}/typo.yaml"], ["typo.yaml", "is a file"]),
        (["gate", "{base}/source", "--against", "{base}/notes", "--skip", "logits=none"], ["dcp:", "hf:"]),
        (["gate", "{base}/source", "--golden", "{base}/nowhere"], ["--golden", "does not exist"]),
        (["plan", "{base}/notes"], ["dcp:", "hf:"]),
        (["plan", "{base}/source", "--family", "lama"], ["lama", "llama"]),
        (["inspect", "{base}/notes"], ["dcp:", "hf:"]),
        (["colour"], ["colour"]),
        (["export", "--colour"], ["--colour"]),
    ],
    ids=lambda value: " ".join(value).replace("{base}/", "")[:60],
)
@pytest.mark.slow
def test_what_cannot_be_done_is_said_in_one_paragraph_with_exit_code_2(command_line, source, tmp_path, arguments, words):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("no checkpoint")
    (tmp_path / "latin1.yaml").write_bytes("source: \xe9\n".encode("latin-1"))
    (tmp_path / "list.yaml").write_text("- source\n")
    (tmp_path / "typo.yaml").write_text(f"source: {source}\ndtyp: bf16\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "broken" / "generation_config.json").write_text("{")
    before = {path.name for path in tmp_path.iterdir()}
    extra = ["--family", "none"] if "broken" in " ".join(arguments) else []
    done = command_line.run(*[a.format(base=tmp_path) for a in arguments], *extra, SHARDWRIGHT_RUNS=str(tmp_path / "runs"))
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    said = done.stderr.replace("\n", " ")
    for word in words:
        assert word in said
    assert {path.name for path in tmp_path.iterdir()} - {"runs"} == before


@pytest.mark.slow
def test_an_export_prints_its_outcome_and_last_the_reports_path(source, tmp_path):
    done = run("export", source, "--to", tmp_path / "out", "--family", "none", *SKIP, "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert is_whole(tmp_path / "out")
    lines = done.stdout.splitlines()
    page = Path(re.fullmatch(r"report\s+(.*)", lines[-1])[1])
    assert page.is_file()
    assert any(line.startswith("published") for line in lines)
    assert "mapping not proven" in lines
    assert beside(tmp_path) == {"source", "out"}


@pytest.mark.slow
def test_json_is_one_object_on_standard_output_and_a_request_file_equals_options(command_line, source, tmp_path):
    (tmp_path / "request.yaml").write_text(
        f"source: {source}\nto: {tmp_path / 'wrong'}\nfamily: none\ndtype: fp32\nskip: ['{NO_FORWARD[0]}']\n"
        f"runs: {tmp_path / 'runs'}\nmax_file: 200\n"
    )
    done = command_line.run("export", "--request", tmp_path / "request.yaml", "--to", tmp_path / "out", "--dtype", "bf16", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["green"] is True
    assert said["to"] == str(tmp_path / "out")
    assert Path(said["report"]).is_file()
    options = ["--family", "none", "--dtype", "bf16", *SKIP, "--max-file", "200", "--runs", tmp_path / "runs"]
    assert command_line.run("export", source, "--to", tmp_path / "same", *options).returncode == 0
    digest = {name: json.loads((tmp_path / name / "shardwright.json").read_text())["plan_digest"] for name in ("out", "same")}
    assert digest["out"] == digest["same"]


@pytest.mark.slow
def test_a_red_check_exits_1_publishes_nothing_and_leaves_the_report(command_line, tmp_path):
    import torch

    source = tmp_path / "source"
    write_shards(source, {"a.weight": torch.tensor([[1.0, float("nan")]]), "b.weight": torch.ones(2, 2)})
    done = command_line.run("export", source, "--to", tmp_path / "out", "--family", "none", *SKIP, "--runs", tmp_path / "runs", "--json")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["green"] is False
    assert "finite.nonfinite" in said["verdict"]
    assert Path(said["report"]).is_file()
    assert beside(tmp_path) == {"source"}


@pytest.mark.slow
def test_plan_and_inspect_write_nothing_and_speak_json(command_line, source, tmp_path):
    planned = command_line.run("plan", source, "--family", "none", "--dtype", "bf16", "--json", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["family"] == "none"
    seen = command_line.run("inspect", source, "--json", cwd=tmp_path)
    assert json.loads(seen.stdout)["format"] == "hf"
    assert beside(tmp_path) == {"source"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_clean_lists_and_removes_what_killed_runs_left(command_line, tmp_path):
    stages = [tmp_path / f".out.shardwright-{n:016x}" for n in range(2)]
    other = tmp_path / ".outer.shardwright-0000000000000000"
    for folder in (*stages, other):
        folder.mkdir()
    done = command_line.run("export", "--clean", "--to", tmp_path / "out")
    assert done.returncode == 0
    assert all(str(stage) in done.stdout for stage in stages)
    assert beside(tmp_path) == {other.name}


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_exits_130(tmp_path):
    import torch

    write_shards(tmp_path / "source", {f"w{n}": torch.ones(4_000_000) for n in range(40)})
    command = ["export", tmp_path / "source", "--to", tmp_path / "out", "--family", "none", *SKIP, "--runs", tmp_path / "runs"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [*PROGRAM, *map(str, command), "--max-file", "20MB"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob(".out.shardwright-*/.progress/*.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert out == ""
    assert not (tmp_path / "out").exists()


# One recorded checkpoint per reader.
RECORDED = ("fsdp2_w2_llama_untied", "dcp_hf_sharded_w2_llama", "hf_shards_llama_tied", "fsdp1_sharded_w2_llama_tied")


@pytest.mark.cases
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_checkpoint_goes_through_the_real_command_with_its_logits(command_line, name, tmp_path):
    case = find_case(name)
    command = ["export", case / "ckpt", "--assets", case / "hf", "--golden", case / "ref/golden.safetensors", "--dtype", "fp32"]
    done = command_line.run(*command, "--to", tmp_path / "out", "--runs", tmp_path / "runs", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["green"] is True
    assert said["mapping"].startswith("mapping proven by: ")
    assert is_whole(tmp_path / "out")
