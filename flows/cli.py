"""The command line. `--help` imports neither torch nor Prefect: whatever needs them is imported inside the commands.

Exit codes: 0 done; 1 a check on the written release failed, nothing published; 2 the work could not be done (request, assets, source).
"""

import sys
from collections.abc import Callable
from importlib.metadata import version as package_version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from flows.advice_command import advise
from flows.drill_commands import add_commands as add_drill_commands
from flows.gate_command import gate
from flows.line import GREEN, Line, reader_may_leave, run_flow
from flows.options import (
    AlsoOption,
    AssetsOption,
    DropOption,
    DtypeOption,
    FamilyOption,
    FileOption,
    GgufOption,
    GoldenOption,
    JsonOption,
    MemoryOption,
    PolicyOption,
    QuantizeOption,
    RunsOption,
    SkipOption,
    SourceArg,
    StepOption,
    TagOption,
    TiedOption,
    WeightsOption,
    is_typed,
)
from flows.policy_commands import policy_app
from flows.request_file import read_request
from flows.requests import ExportRequest, default_runs
from flows.reshard_command import reshard
from flows.retention_commands import add_commands as add_retention_commands
from flows.serve_command import serve
from flows.server import has_terminal_to_ask
from reports.errors import ReleaseError

REFUSED, INTERRUPTED = 2, 130
app = typer.Typer(
    name="shardwright",
    help="Turn sharded training checkpoints into verified release weights.\n\n"
    "Reads PyTorch DCP/FSDP (torchtitan and accelerate folders too), DeepSpeed, Megatron and Hugging Face checkpoints without running a"
    " pickle; publishes nothing that has not been re-read from disk and checked.\n\n"
    "Start with: shardwright demo",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(policy_app)
app.command()(reshard)
app.command()(gate)
app.command()(advise)
app.command()(serve)
add_drill_commands(app)
add_retention_commands(app)


def main() -> None:
    """Run the command line and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names from a checkpoint or a disk may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:] or ["--help"]
    sys.exit(_guarded(lambda: app(arguments, prog_name="shardwright", standalone_mode=False)))


def _guarded(command: Callable[[], object]) -> int:
    try:
        code = command()
    except ReleaseError as error:
        print("\n".join([f"shardwright: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return REFUSED
    except ValidationError as error:
        for problem in error.errors():
            option = "--" + str(problem["loc"][0]).replace("_", "-") if problem["loc"] else "request"
            print(f"shardwright: {option}: {problem['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"shardwright: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return REFUSED
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except typer.TyperException as error:
        print(f"shardwright: {error.format_message().removesuffix('.')}. See shardwright --help.", file=sys.stderr)
        return REFUSED
    if code == INTERRUPTED:  # which typer makes of Ctrl-C
        print("shardwright: interrupted; the same command does it again, an export from the files already written", file=sys.stderr)
    return code if isinstance(code, int) else GREEN


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardwright {package_version('shardwright')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def export(
    context: typer.Context,
    source: Annotated[Path | None, typer.Argument(help="The checkpoint: its folder, or a training run's root.", show_default=False)] = None,
    to: Annotated[Path | None, typer.Option(help="Where the release will be; must not exist.", show_default=False)] = None,
    assets: AssetsOption = None,
    golden: GoldenOption = None,
    dtype: DtypeOption = "source",
    quantize: QuantizeOption = "",
    gguf: GgufOption = "",
    weights: WeightsOption = "stored",
    family: FamilyOption = "auto",
    step: StepOption = None,
    tag: TagOption = "",
    also: AlsoOption = None,
    drop: DropOption = None,
    skip: SkipOption = None,
    policy: PolicyOption = None,
    keep_tied_head: TiedOption = False,
    max_file: FileOption = "5GB",
    workers: Annotated[int, typer.Option(help="Output files written at a time.")] = 2,
    witness_memory: MemoryOption = "8GB",
    approve: Annotated[bool, typer.Option("--approve", help="Ask a person before publishing; silence rejects.")] = False,
    approve_within: Annotated[int, typer.Option(metavar="SECONDS", help="How long to wait for that answer.")] = 86_400,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for another export to --to to end, instead of refusing.")] = False,
    keep_stage: Annotated[bool, typer.Option("--keep-stage", help="Keep the staging folder when a check fails.")] = False,
    no_fsync: Annotated[bool, typer.Option("--no-fsync", help="Publish without waiting for the disk (benchmarks, scratch space).")] = False,
    request_file: Annotated[
        Path | None, typer.Option("--request", help="YAML file of these options, as the Prefect form takes them.", show_default=False)
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="List and remove staging folders that killed runs left beside --to; export nothing.")
    ] = False,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Export a sharded checkpoint into verified, published release weights.

    The release appears at --to only when every check has passed on the bytes re-read from disk. Exit code 0: published. 1: a check
    failed, nothing published, the report says why. 2: the request, the assets or the checkpoint are at fault.

    Example: shardwright export runs/step-3000 --assets hf/ --golden golden.safetensors --dtype bf16 --to release/
    """
    given = {
        "source": source,
        "to": to,
        "assets": assets,
        "golden": golden,
        "dtype": dtype,
        "quantize": quantize,
        "gguf": gguf,
        "weights": weights,
        "family": family,
        "step": step,
        "tag": tag,
        "also": also or [],
        "drop": drop or [],
        "skip": skip or [],
        "policy": policy,
        "keep_tied_head": keep_tied_head,
        "max_file": max_file,
        "workers": workers,
        "witness_memory": witness_memory,
        "approve": approve,
        "approve_within": approve_within,
        "wait": wait,
        "keep_stage": keep_stage,
        "fsync": not no_fsync,
        "runs": runs or default_runs(),
    }
    if clean:
        from flows.cleaning import remove_stages

        remove_stages(to)
        return GREEN
    typed = {"fsync" if name == "no_fsync" else name for name in context.params if is_typed(context, name)}
    request = read_request(request_file, given, typed)
    return _run_export(request, as_json=as_json)


def _run_export(request: ExportRequest, *, as_json: bool) -> int:
    at_terminal = request.approve and has_terminal_to_ask()
    if request.approve and not at_terminal:
        print("asks     in the page of the Prefect server that is configured: the run pauses there, Resume opens the form", file=sys.stderr)

    def load() -> Line[ExportRequest]:
        from flows.approval import ASKING, ask_at_terminal
        from flows.export import check_request, export

        if at_terminal:
            ASKING.set(ask_at_terminal)
        return check_request, export

    return run_flow(request, load, runs_model="logits" not in request.skips, as_json=as_json)


@app.command()
def plan(
    source: SourceArg,
    assets: AssetsOption = None,
    dtype: DtypeOption = "source",
    quantize: QuantizeOption = "",
    gguf: GgufOption = "",
    weights: WeightsOption = "stored",
    family: FamilyOption = "auto",
    step: StepOption = None,
    tag: TagOption = "",
    also: AlsoOption = None,
    drop: DropOption = None,
    keep_tied_head: TiedOption = False,
    max_file: FileOption = "5GB",
    out: Annotated[Path | None, typer.Option(help="Write the whole plan there, as JSON.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> int:
    """Show what an export would write, without writing it. Reads metadata only.

    Example: shardwright plan runs/step-3000 --assets hf/ --dtype bf16
    """
    from flows.preview import plan_export, print_plan

    request = ExportRequest.model_validate(
        {
            "source": source,
            "to": Path("release"),
            "assets": assets,
            "dtype": dtype,
            "quantize": quantize,
            "gguf": gguf,
            "weights": weights,
            "family": family,
            "step": step,
            "tag": tag,
            "also": also or [],
            "drop": drop or [],
            "keep_tied_head": keep_tied_head,
            "max_file": max_file,
        }
    )
    preview = plan_export(request, out)
    with reader_may_leave():
        print_plan(preview, as_json=as_json)
    return GREEN


@app.command()
def inspect(
    source: SourceArg,
    step: StepOption = None,
    tag: TagOption = "",
    also: AlsoOption = None,
    goals: Annotated[Path | None, typer.Option(help="The drill's YAML, with what its owner declares.", show_default=False)] = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say what a checkpoint is and holds: format, step, tensors, training state, and whether training can come back from it.

    Reads metadata and the small objects of the training state only.

    Example: shardwright inspect runs/step-3000
    """
    from flows.inspection import inspect_checkpoint, print_inspection

    inspection = inspect_checkpoint(source, tuple(also or ()), step, tag, runs or default_runs(), goals)
    with reader_may_leave():
        print_inspection(inspection, as_json=as_json)
    return GREEN


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Where the toy checkpoint and its release go.")] = Path("demo"),
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Shard a toy model with torch's own DCP over two processes, export it, and print the path of a green report.

    Takes about half a minute on a laptop's CPU. What an earlier demo left in the folder is replaced.
    """
    from flows.server import prepare_prefect

    prepare_prefect()
    from flows.demo import make_demo

    checkpoint = make_demo(folder)
    request = ExportRequest(
        source=checkpoint.checkpoint,
        to=checkpoint.release,
        assets=checkpoint.assets,
        golden=checkpoint.golden,
        dtype="bf16",
        runs=runs or default_runs(),
    )
    return _run_export(request, as_json=as_json)


if __name__ == "__main__":
    main()
