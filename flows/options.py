"""The options that several commands share: one help text each."""

from pathlib import Path
from typing import Annotated

import typer

SourceArg = Annotated[
    Path, typer.Argument(help="The checkpoint: its folder, or a training run's root with several steps.", show_default=False)
]
StepOption = Annotated[int | None, typer.Option(help="Step of a run's root. [default: the newest complete one]", show_default=False)]
TagOption = Annotated[
    str, typer.Option(help="Save of a folder that holds several under tags (DeepSpeed). [default: the latest]", show_default=False)
]
AlsoOption = Annotated[
    list[Path] | None, typer.Option(help="Another root of the same save (node-local disks). May be repeated.", show_default=False)
]
AssetsOption = Annotated[
    Path | None,
    typer.Option(help="Folder of config.json and tokenizer. [default: the checkpoint, if it holds a config]", show_default=False),
]
FamilyOption = Annotated[
    str,
    typer.Option(
        help="auto, none (keep own names), or a family: llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, deepseek_v3, gpt2."
    ),
]


def _refuse_blank(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
    # Blank is the default and means no; typed, it is a variable of a script that was empty.
    if not value and is_typed(context, str(option.name)):
        raise typer.BadParameter("is blank. Name an encoding, or leave the option out.", context, param_hint=f"--{option.name}")
    return value


DtypeOption = Annotated[str, typer.Option(help="source, fp32, bf16 or fp16.")]
QuantizeOption = Annotated[
    str,
    typer.Option(
        metavar="ENCODING|FILE",
        help="Store linear layers quantized: fp8, fp8-block, int8, int8-w8a8, int4, or as a YAML file of rules says.",
        callback=_refuse_blank,
        show_default=False,
    ),
]
GgufOption = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="Write one GGUF file instead, its matrices as f16, bf16 or q8_0.",
        callback=_refuse_blank,
        show_default=False,
    ),
]
WeightsOption = Annotated[
    str, typer.Option(help="stored: the model's own tensors. master: the optimizer's fp32 masters (DeepSpeed's are always).")
]
DropOption = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN=REASON", help="Leave source tensors out on purpose. May be repeated.", show_default=False),
]
TiedOption = Annotated[bool, typer.Option("--keep-tied-head", help="Write the head of a tied model as well.")]
FileOption = Annotated[str, typer.Option(help="Tensor bytes per output file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
GoldenOption = Annotated[
    Path | None,
    typer.Option(help="safetensors file of input_ids and logits the trainer recorded: proves the mapping.", show_default=False),
]
SkipOption = Annotated[
    list[str] | None, typer.Option(metavar="CHECK=REASON", help="Leave a check out on purpose. May be repeated.", show_default=False)
]
MemoryOption = Annotated[str, typer.Option(help="Memory the logits comparison may use; beyond it, disk offload.")]
RunsOption = Annotated[
    Path | None, typer.Option(help="Where run folders go. [default: $SHARDWRIGHT_RUNS, else ./runs]", show_default=False)
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(help="policy.yaml: required checks, limits, waivers (see shardwright policy init).", show_default=False),
]


def is_typed(context: typer.Context, name: str) -> bool:
    """Return whether an option was given, and is not just its default.

    Args:
        context: of the command.
        name: the parameter.

    Returns:
        Whether it was.
    """
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
