"""`shardwright gate`."""

from pathlib import Path
from typing import Annotated

import typer

from flows.line import Line, run_flow
from flows.options import (
    DropOption,
    FamilyOption,
    GoldenOption,
    JsonOption,
    MemoryOption,
    PolicyOption,
    RunsOption,
    SkipOption,
    StepOption,
    TagOption,
)
from flows.requests import GateRequest, default_runs


def gate(
    release: Annotated[Path, typer.Argument(help="The folder of release weights, whoever made it.", show_default=False)],
    against: Annotated[
        Path | None,
        typer.Option(
            help="The checkpoint it was made from: exact values and logits are compared with it. Or an earlier release (see --weights).",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            help="Whether the weights must be those of --against: same, retrained, or auto (same, unless exported from different steps)."
        ),
    ] = "auto",
    assets: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the config and tokenizer it must have. [default: --against, if it holds a config]", show_default=False
        ),
    ] = None,
    step: StepOption = None,
    tag: TagOption = "",
    golden: GoldenOption = None,
    family: FamilyOption = "auto",
    drop: DropOption = None,
    skip: SkipOption = None,
    policy: PolicyOption = None,
    prove: Annotated[int, typer.Option(help="Plant that many faults into the evidence, and see that the checks catch each.")] = 0,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="Read no tensor if files, config, tokenizer or names already show an error.")
    ] = False,
    changed_since: Annotated[
        Path | None,
        typer.Option(help="report.json of an earlier gate: weight files with the same sha256 are not measured again.", show_default=False),
    ] = None,
    workers: Annotated[int, typer.Option(help="Tensors read at a time.")] = 2,
    witness_memory: MemoryOption = "8GB",
    report: Annotated[Path | None, typer.Option(help="Folder to copy the report's four files to.", show_default=False)] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the results there too, as JUnit XML.", show_default=False)] = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Give one verdict on a finished folder of release weights. Changes nothing in it.

    Without --against, --assets and --golden the folder is judged by itself: files, names, shapes, config, tokenizer, values. In a GitHub
    workflow the summary of the step shows the report. Exit code 0: accepted. 1: a check failed. 2: it could not be judged.

    Example: shardwright gate release/ --against runs/step-3000 --golden golden.safetensors
    """
    request = GateRequest.model_validate(
        {
            "release": release,
            "against": against,
            "weights": weights,
            "assets": assets,
            "step": step,
            "tag": tag,
            "golden": golden,
            "family": family,
            "drop": drop or [],
            "skip": skip or [],
            "policy": policy,
            "prove": prove,
            "stop_early": stop_early,
            "changed_since": changed_since,
            "workers": workers,
            "witness_memory": witness_memory,
            "report": report,
            "junit": junit,
            "runs": runs or default_runs(),
        }
    )

    def load() -> Line[GateRequest]:
        from flows.gate import check_request, release_gate

        return check_request, release_gate

    runs_model = "logits" not in request.skips and (against is not None or golden is not None)
    return run_flow(request, load, runs_model=runs_model, as_json=as_json)
