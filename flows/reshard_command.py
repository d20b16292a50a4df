"""`shardwright reshard`: a checkpoint in another layout."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.options import AlsoOption, AssetsOption, DropOption, FamilyOption, SourceArg, StepOption, TagOption, is_typed
from flows.requests import split_reasons
from reports.errors import FormatError, RequestError
from reports.paths import real_path

RanksOption = Annotated[int, typer.Option(min=1, help="megatron: ranks of this axis.")]
VirtualOption = Annotated[int, typer.Option(min=1, help="megatron: virtual stages of each pipeline stage.")]
ExpertOption = Annotated[int | None, typer.Option(min=1, help="megatron: ranks that share an expert. [default: --tp]", show_default=False)]
SpecOption = Annotated[
    Literal["local", "transformer_engine"] | None,
    typer.Option("--transformer-impl", help="megatron: whose names. [default: the source's, else local]", show_default=False),
]
VocabOption = Annotated[
    int | None,
    typer.Option(
        "--make-vocab-size-divisible-by",
        min=1,
        help="megatron: pads the vocabulary, times --tp. [default: the source's, else 128]",
        show_default=False,
    ),
]
LayersOption = Annotated[
    str,
    typer.Option(
        "--layers-per-stage",
        help="megatron: layers of each pipeline stage, as 3,5; those of the first virtual stage first. [default: equal numbers]",
        show_default=False,
    ),
]
LayoutOption = Annotated[
    Literal["universal", "megatron"],
    typer.Option("--format", help="universal: DeepSpeed's, from a ZeRO save. megatron: weights of any source as Megatron-LM's ranks."),
]
# Parameter → its option, of those that only ranks of Megatron have.
_OF_MEGATRON = {
    **{name: name for name in ("drop", "assets", "family", "tp", "pp", "ep", "etp", "vpp")},
    **{"spec": "transformer-impl", "layers": "layers-per-stage", "vocab_multiple": "make-vocab-size-divisible-by"},
}
_LOADED_BY = {
    "universal": 'load it with "checkpoint": {"load_universal": true} in DeepSpeed\'s config',
    "megatron": "weights only, no optimizer state: load it with --load DIR --finetune, or --no-load-optim --no-load-rng",
}


def reshard(
    context: typer.Context,
    source: SourceArg,
    to: Annotated[Path, typer.Option(help="Where the checkpoint will be; must not exist.")],
    layout: LayoutOption = "universal",
    step: StepOption = None,
    tag: TagOption = "",
    also: AlsoOption = None,
    drop: DropOption = None,
    assets: AssetsOption = None,
    family: FamilyOption = "auto",
    tp: RanksOption = 1,
    pp: RanksOption = 1,
    ep: RanksOption = 1,
    etp: ExpertOption = None,
    vpp: VirtualOption = 1,
    layers: LayersOption = "",
    spec: SpecOption = None,
    vocab_multiple: VocabOption = None,
) -> None:
    """Write a checkpoint in another layout. Every tensor is read back and compared bit for bit.

    Example: shardwright reshard runs/my-run --to universal --format universal

    Example: shardwright reshard hf-folder --to ranks --format megatron --tp 4 --pp 2
    """
    from reports.spell import format_bytes

    roots = tuple(path.absolute() for path in also or ())
    _refuse_options_of_other(layout, context)
    if layout == "megatron":
        from flows.reshard_megatron import MegatronRequest, write_megatron_save

        ranks = {"tp": tp, "pp": pp, "ep": ep, "etp": etp or tp, "vpp": vpp}
        drops, stages = _reasons_of(drop or []), _numbers_of(layers)
        request = MegatronRequest(source.absolute(), roots, step, tag, assets, family, ranks, drops, spec, vocab_multiple, stages)
        made = write_at(to.absolute(), (source, *roots), lambda stage: write_megatron_save(request, stage))
    else:
        made = write_checkpoint(source.absolute(), to.absolute(), also=roots, step=step, tag=tag)
    files = [path for path in made.rglob("*") if path.is_file()]
    print(f"written  {made}, {len(files)} files, {format_bytes(sum(path.stat().st_size for path in files))}; every tensor read back equal")
    print(f"format   {layout}; {_LOADED_BY[layout]}")


def _reasons_of(drops: list[str]) -> tuple[tuple[str, str], ...]:
    try:
        return split_reasons(drops)
    except ValueError as error:
        raise RequestError(str(error), where="--drop") from None


def _numbers_of(layers: str) -> tuple[int, ...]:
    texts = [text.strip() for text in layers.split(",")] if layers else []
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise RequestError(f"{layers!r} is no list of numbers", where="--layers-per-stage", remedy="Write it as 3,5.")
    return tuple(map(int, texts))


def _refuse_options_of_other(layout: str, context: typer.Context) -> None:
    # The command has the options of both formats; one that would do nothing was meant for the other.
    typed = [name for name in _OF_MEGATRON if is_typed(context, name)]
    if layout != "megatron" and typed:
        raise RequestError(
            f"--format {layout} is not cut that way", where=f"--{_OF_MEGATRON[typed[0]]}", remedy="Add --format megatron, or leave it out."
        )


def write_checkpoint(source: Path, to: Path, *, also: tuple[Path, ...] = (), step: int | None = None, tag: str = "") -> Path:
    """Write a ZeRO save as a universal checkpoint; it appears at `to` by one rename, when it has been proven.

    Args:
        source: the save, or its root.
        to: must not exist.
        also: more roots of the same save.
        step: which step of a run's root.
        tag: which save of a root.

    Returns:
        `to`.

    Raises:
        RequestError: `to` exists, or lies inside the source.
        FormatError: not a ZeRO save.
        ReleaseError: whatever writing shows.
    """
    from tasks.engine.formats.readers import open_checkpoint
    from tasks.engine.formats.zero import ZeroReader
    from tasks.engine.writing.universal import write_universal

    def write(stage: Path) -> None:
        reader = open_checkpoint(source, also=also, step=step, tag=tag)
        if not isinstance(reader, ZeroReader):
            raise FormatError(
                f"is of format {reader.name}", where=str(source), remedy="Universal checkpoints are written from ZeRO saves only."
            )
        write_universal(reader, stage)

    return write_at(to, (source, *also), write)


def write_at(to: Path, sources: tuple[Path, ...], write: Callable[[Path], object]) -> Path:
    """Have a folder written beside its place, and put it there by one rename.

    Args:
        to: must not exist.
        sources: the roots it is made of.
        write: fills an empty folder, and proves what is in it.

    Returns:
        `to`.

    Raises:
        RequestError: `to` exists, or lies inside a source.
        ReleaseError: whatever writing shows; nothing is left then.
    """
    from tasks.engine.writing.stage import lock_of, rename_noreplace, sync_tree

    if os.path.lexists(to):
        raise RequestError("exists already", where=f"--to {to}", remedy="Nothing is ever overwritten: choose another --to.")
    if any(real_path(to).is_relative_to(real_path(root)) for root in sources):
        raise RequestError("lies inside the checkpoint", where=f"--to {to}", remedy="Choose another --to.")
    to.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(to):
        stage = to.parent / f".{to.name}.shardwright-reshard"
        shutil.rmtree(stage, ignore_errors=True)  # of a killed run
        stage.mkdir()
        try:
            write(stage)
            sync_tree(stage)
            rename_noreplace(stage, to)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return to
