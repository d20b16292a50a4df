"""`shardwright reshard`: a checkpoint with its training state, in another layout."""

import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.options import AlsoOption, SourceArg, StepOption, TagOption
from reports.errors import FormatError, RequestError


def reshard(
    source: SourceArg,
    to: Annotated[Path, typer.Option(help="Where the checkpoint will be; must not exist.")],
    layout: Annotated[
        Literal["universal"], typer.Option("--format", help="universal: DeepSpeed's, from a ZeRO save, for another world size.")
    ] = "universal",
    step: StepOption = None,
    tag: TagOption = "",
    also: AlsoOption = None,
) -> None:
    """Write a checkpoint, training state included, in another layout. Every tensor is read back and compared bit for bit.

    Example: shardwright reshard runs/my-run --to universal --format universal
    """
    from flows.terminal import format_bytes

    made = write_checkpoint(source.absolute(), to.absolute(), also=tuple(path.absolute() for path in also or ()), step=step, tag=tag)
    files = [path for path in made.rglob("*") if path.is_file()]
    print(f"written  {made}, {len(files)} files, {format_bytes(sum(path.stat().st_size for path in files))}; every tensor read back equal")
    print(f'format   {layout}; load it with "checkpoint": {{"load_universal": true}} in DeepSpeed\'s config')


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
    from tasks.engine.writing.stage import lock_of, rename_noreplace, sync_tree
    from tasks.engine.writing.universal import write_universal

    if os.path.lexists(to):
        raise RequestError("exists already", where=f"--to {to}", remedy="Nothing is ever overwritten: choose another --to.")
    if any(to.resolve().is_relative_to(root.resolve()) for root in (source, *also)):
        raise RequestError("lies inside the checkpoint", where=f"--to {to}", remedy="Choose another --to.")
    reader = open_checkpoint(source, also=also, step=step, tag=tag)
    if not isinstance(reader, ZeroReader):
        raise FormatError(
            f"is of format {reader.name}", where=str(source), remedy="Universal checkpoints are written from ZeRO saves only."
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    with lock_of(to):
        stage = to.parent / f".{to.name}.shardwright-universal"
        shutil.rmtree(stage, ignore_errors=True)  # of a killed run
        stage.mkdir()
        try:
            write_universal(reader, stage)
            sync_tree(stage)
            rename_noreplace(stage, to)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return to
