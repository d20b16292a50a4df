"""The rank folders of a legacy Megatron save: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, opened and named by coordinates.

What the second number of `mp_rank_00_001` counts, only args tell. The grid of tensor- and expert-parallel ranks may be sparse: with
expert-tensor-parallel 1, a file holds whole experts, and not every pair of numbers has one.

Refused: ranks missing, files of two saves, the layouts before Megatron Core.

Source: Megatron-LM core 0.12 to main, megatron/training/checkpointing.py (`get_checkpoint_name`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from reports.errors import FormatError, name_some
from tasks.engine.containers.torch_pickle import StoredTensor, describe
from tasks.engine.containers.torch_zip import Archive
from tasks.engine.formats.folders import FoundFile, find_files, list_names
from tasks.engine.formats.megatron_args import MEGATRON_GLOBALS, REMEDY, Arguments, Layout, read_layout
from tasks.engine.formats.reader import Source
from tasks.engine.formats.torch_files import open_torch_file

RANK_FOLDER = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/$")
MODEL_FILE = "model_optim_rng.pt"
_CHUNK_KEY = re.compile(r"^model(\d*)$")


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file. `chunks` are its model's parts, one per virtual pipeline stage, tensors by name; `rest` what lies beside them."""

    folder: str
    tp: int
    pp: int
    ep: int
    found: FoundFile
    archive: Archive
    args: Mapping[str, object]
    chunks: tuple[Mapping[str, StoredTensor], ...]
    rest: Mapping[str, object]

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """Its place on the pipeline, tensor and expert axes."""
        return self.pp, self.tp, self.ep


@dataclass(frozen=True, slots=True)
class Ranks:
    """All files of a save, by coordinates, and the layout they state."""

    files: tuple[RankFile, ...]
    layout: Layout

    def expert_tp(self, file: RankFile) -> int:
        """Return a file's place among the expert-tensor-parallel ranks.

        Args:
            file: one of `files`.

        Returns:
            Its coordinate.
        """
        return file.tp % self.layout.etp


def list_rank_folders(folder: Path) -> list[str]:
    """Return the names of a folder's rank folders.

    Args:
        folder: an existing folder.

    Returns:
        Names, each with its `/`.
    """
    return [name for name in list_names(folder) if RANK_FOLDER.match(name)]


def open_ranks(source: Source, inner: str) -> Ranks:
    """Open every rank's file of a save.

    Args:
        source: the roots.
        inner: the save's folder inside the main root, "" for the root itself.

    Returns:
        The files, by coordinates.

    Raises:
        HostilePickleError: a global outside the closed list.
        FormatError: ranks missing, files damaged or of two saves.
    """
    where = str(source.path / inner)
    folders = sorted({name for root in _folders(source, inner) for name in list_rank_folders(root)})
    found = find_files(source, inner, {f"{name}{MODEL_FILE}": 1 for name in folders})
    opened = [_open(name, found[f"{name}{MODEL_FILE}"]) for name in folders]
    layouts = [read_layout(args, file.absolute) for file, _, args, _ in opened]
    files = tuple(
        sorted(
            (_place(name, file, layout) for name, file, layout in zip(folders, opened, layouts, strict=True)),
            key=lambda file: file.coordinates,
        )
    )
    _refuse_mixture(files, layouts, where)
    ranks = Ranks(files, layouts[0])
    _refuse_twins(files, where)
    _refuse_missing(ranks, where)
    return ranks


def _folders(source: Source, inner: str) -> Iterable[Path]:
    candidates = [source.path / inner, *(folder for root in source.also for folder in dict.fromkeys((root / inner, root)))]
    return [folder for folder in candidates if folder.is_dir()]


def _open(folder: str, found: FoundFile) -> tuple[FoundFile, Archive, Mapping[str, object], Mapping[str, object]]:
    archive = open_torch_file(found.absolute)
    held = describe(archive, MEGATRON_GLOBALS)
    if not isinstance(held, dict) or not any(isinstance(key, str) and _CHUNK_KEY.match(key) for key in held):
        raise FormatError("holds no model", where=found.absolute, remedy="Point at a checkpoint that Megatron's trainer wrote.")
    args = held.get("args")
    if not isinstance(args, Arguments):
        raise FormatError(
            f"{folder} has no args, so nothing says how the model was cut",
            where=found.absolute,
            remedy="Load and save it once with a Megatron that writes args.",
        )
    version = held.get("checkpoint_version", 0)
    if not isinstance(version, (int, float)) or version < 2:
        raise FormatError(
            f"checkpoint_version is {version!r}: before 2.0, Q, K and V rows lay in another order",
            where=found.absolute,
            remedy="Load and save it once with a newer Megatron.",
        )
    return found, archive, args.values, {str(key): value for key, value in held.items()}


def _place(folder: str, opened: tuple[FoundFile, Archive, Mapping[str, object], Mapping[str, object]], layout: Layout) -> RankFile:
    found, archive, args, held = opened
    match = RANK_FOLDER.match(folder)
    assert match is not None
    tp, *rest = (int(number) for number in match.groups() if number is not None)
    axes = [axis for axis, size in (("pp", layout.pp), ("ep", layout.ep)) if size > 1]
    if len(axes) != len(rest):
        raise FormatError(
            f"{folder} has {len(rest)} numbers behind the first, but args say pp={layout.pp}, ep={layout.ep}",
            where=found.absolute,
            remedy="Name the folders as Megatron does, or restore the save.",
        )
    numbers = dict(zip(axes, rest, strict=True))
    keys = sorted((key for key in held if _CHUNK_KEY.match(key)), key=lambda key: int(key[5:] or 0))
    chunks = tuple(_tensors(key, held[key], found.absolute) for key in keys)
    others = {key: value for key, value in held.items() if key not in keys}
    return RankFile(folder.rstrip("/"), tp, numbers.get("pp", 0), numbers.get("ep", 0), found, archive, args, chunks, others)


def _tensors(key: str, chunk: object, where: str) -> dict[str, StoredTensor]:
    if not isinstance(chunk, dict):
        raise FormatError(f"{key} is a {type(chunk).__name__}, not a state dict", where=where, remedy=REMEDY)
    nested = sorted(str(name) for name, value in chunk.items() if isinstance(value, dict))
    if nested:
        raise FormatError(
            f"{key} is nested ({name_some(nested)}): written by Megatron's models before Megatron Core, which are not read",
            where=where,
            remedy="Convert it to Megatron Core with Megatron's tools/checkpoint/convert.py.",
        )
    return {str(name): value for name, value in chunk.items() if isinstance(value, StoredTensor)}


def _refuse_mixture(files: Sequence[RankFile], layouts: Sequence[Layout], where: str) -> None:
    for layout in layouts[1:]:
        difference = layouts[0].difference(layout)
        if difference:
            raise FormatError(f"the files' args differ: {difference}; parts of two saves", where=where, remedy=REMEDY)
    steps = sorted({str(file.rest.get("iteration")) for file in files})
    if len(steps) > 1:
        raise FormatError(f"the files are of iterations {', '.join(steps)}", where=where, remedy=REMEDY)
    layout = layouts[0]
    strange = [f.folder for f in files if f.tp >= layout.tp or f.pp >= layout.pp or f.ep >= layout.ep]
    if strange:
        sizes = f"tp={layout.tp}, pp={layout.pp}, ep={layout.ep}"
        raise FormatError(f"is a save of {sizes}, so {name_some(strange)} are of another", where=where, remedy=REMEDY)


def _refuse_twins(files: Sequence[RankFile], where: str) -> None:
    seen: dict[tuple[int, int, int], str] = {}
    for file in files:
        if file.coordinates in seen:
            raise FormatError(f"{seen[file.coordinates]} and {file.folder} are the same rank", where=where, remedy=REMEDY)
        seen[file.coordinates] = file.folder


def _refuse_missing(ranks: Ranks, where: str) -> None:
    # Dense weights need every (tp, pp), experts every (expert-tp, ep, pp).
    layout, lost = ranks.layout, []
    dense = {(file.pp, file.tp) for file in ranks.files}
    for pp in range(layout.pp):
        of_stage = [file for file in ranks.files if file.pp == pp]
        if not of_stage:
            lost.append(f"pp={pp}, and with it that whole pipeline stage")
            continue
        tps = [tp for tp in range(layout.tp) if (pp, tp) not in dense]
        lost += [f"tp={tp}, pp={pp}, and with it part {tp} of {layout.tp} of that stage's weights" for tp in tps]
        if tps or not layout.num_experts:
            continue
        held = {(ranks.expert_tp(file), file.ep) for file in of_stage}
        per_rank = layout.num_experts // layout.ep
        for ep, etp in product(range(layout.ep), range(layout.etp)):
            if (etp, ep) not in held:
                rank = f"expert-tp={etp}, ep={ep}, pp={pp}" if layout.etp > 1 else f"ep={ep}, pp={pp}"
                lost.append(f"{rank}, and with it experts {ep * per_rank}-{(ep + 1) * per_rank - 1}")
    if lost:
        raise FormatError(
            f"incomplete save of tp={layout.tp}, pp={layout.pp}, ep={layout.ep}: no file of {name_some(lost)}; there are"
            f" {name_some(file.folder for file in ranks.files)}",
            where=where,
            remedy="Restore the files, name the folders of the other nodes with --also, or export another step.",
        )
