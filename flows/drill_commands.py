"""`shardwright drill`, `record` and `drills`: whether training can come back from its checkpoints."""

from pathlib import Path
from typing import Annotated

import typer

from flows.drill_requests import DrillRequest
from flows.line import GREEN, Line, reader_may_leave, run_flow
from flows.options import AlsoOption, JsonOption, RunsOption, SourceArg, StepOption
from flows.requests import default_runs

RootArg = Annotated[Path, typer.Argument(help="The training run's root, with a folder per save; or one save.", show_default=False)]


def drill(
    root: RootArg,
    level: Annotated[
        str | None, typer.Option(help="D1 commit, D2 state, D3 resume; each includes those before. [default: D2, with --resume D3]")
    ] = None,
    resume: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Your training step, to continue with.", show_default=False)] = "",
    steps: Annotated[int, typer.Option(help="Steps to continue for, at most as many as are logged.")] = 20,
    goals: Annotated[Path | None, typer.Option(help="YAML of targets: rto_seconds, rpo_steps, mtbf_seconds …", show_default=False)] = None,
    log: Annotated[Path | None, typer.Option(help="The trainer's log as JSON lines: what would be lost.", show_default=False)] = None,
    also: AlsoOption = None,
    workers: Annotated[int, typer.Option(help="Tensors read at a time.")] = 2,
    world: Annotated[int, typer.Option(help="Ranks to resume with. [default: as many as had saved]", show_default=False)] = 0,
    max_ranks: Annotated[int, typer.Option(help="Processes that may run at a time.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds that a restore or a resume may take.")] = 1800.0,
    memory: Annotated[str, typer.Option(help="Bytes that a restore may hold at a time.")] = "8GB",
    junit: Annotated[Path | None, typer.Option(help="Write the results there too, as JUnit XML.", show_default=False)] = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Prove that training can come back from a run's newest checkpoint and an older one. Changes nothing of the run.

    At level D3 torch's own loader restores it in real processes; with --resume your own code then continues training, and every loss, rate
    and batch is held against the log.

    Exit code 0: restorable. 1: a check failed, the report says why. 2: it could not be drilled.

    Example: shardwright drill runs/ --goals drill.yaml --log train.jsonl --resume my_trainer:build
    """
    request = DrillRequest.model_validate(
        {
            "root": root,
            "level": level,
            "resume": resume,
            "steps": steps,
            "world": world,
            "max_ranks": max_ranks,
            "timeout": timeout,
            "memory": memory,
            "goals": goals,
            "log": log,
            "also": also or [],
            "workers": workers,
            "junit": junit,
            "runs": runs or default_runs(),
        }
    )

    def load() -> Line[DrillRequest]:
        from flows.restore_drill import check_request, restore_drill

        return check_request, restore_drill

    return run_flow(request, load, runs_model=False, as_json=as_json)


def record(
    checkpoint: SourceArg,
    step: StepOption = None,
    also: AlsoOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace what was recorded before.")] = False,
    workers: Annotated[int, typer.Option(help="Tensors read at a time.")] = 2,
) -> int:
    """Write down digests of every tensor and object of a checkpoint, in one file inside it. Drills compare with them.

    Example: shardwright record runs/step-3000
    """
    from flows.recording import record_checkpoint

    path, entries = record_checkpoint(checkpoint, tuple(also or ()), step, replace=replace, workers=workers)
    with reader_may_leave():
        print(f"recorded {entries} entries: {path}")
    return GREEN


def drills(
    root: Annotated[Path | None, typer.Argument(help="Of which run. [default: all]", show_default=False)] = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """List the drills that were made.

    Example: shardwright drills checkpoints/
    """
    from flows.recording import print_history

    with reader_may_leave():
        print_history(runs or default_runs(), root, as_json=as_json)
    return GREEN


def add_commands(app: typer.Typer) -> None:
    """Register the commands.

    Args:
        app: the command line.
    """
    for command in (drill, record, drills):
        app.command()(command)
