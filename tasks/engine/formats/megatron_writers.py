"""Which process wrote each rank's file, held against the folder it lies in: files that were exchanged or copied over another are refused.

Nothing in a tensor says which part of a weight it is, so exchanged files would merge into a release of the right shapes. But `args` hold
the rank of the process that wrote them. Whatever order a run numbers its processes in, a process that is further on one axis, and on no
axis before another, has the higher rank. Tools that convert checkpoints leave the same rank in every file; that says nothing.

Source: Megatron-LM core 0.12 to main, megatron/training/initialize.py (`args.rank`), megatron/core/parallel_state.py (`RankGenerator`).
"""

from collections.abc import Sequence
from itertools import combinations

from reports.errors import FormatError
from tasks.engine.formats.megatron_args import Layout
from tasks.engine.formats.megatron_files import RankFile

_REMEDY = "Put each file back into its own folder, from another copy of the save."


def refuse_exchanged(files: Sequence[RankFile], layout: Layout, where: str) -> None:
    """Raise when files do not lie where their writers would have put them.

    Args:
        files: of one save, by coordinates.
        layout: what their args state.
        where: the save, for messages.

    Raises:
        FormatError: two files are exchanged, or are the same one.
    """
    _refuse_copies(files, where)
    ranks = {file.folder: file.args.get("rank") for file in files}
    if not all(type(rank) is int for rank in ranks.values()) or len(set(ranks.values())) == 1 or layout.etp > layout.tp:
        return
    for first, second in combinations(files, 2):
        one, other = ranks[first.folder], ranks[second.folder]
        assert isinstance(one, int)
        assert isinstance(other, int)
        if one == other:
            what = f"{first.folder} and {second.folder} were both written by rank {one}: one was copied over the other"
            raise FormatError(what, where=where, remedy=_REMEDY, code="source.ranks-exchanged")
        if one > other and all(a <= b for a, b in zip(first.coordinates, second.coordinates, strict=True)):
            what = f"{first.folder} was written by rank {one}, {second.folder} by rank {other}: files or folders were exchanged"
            raise FormatError(what, where=where, remedy=_REMEDY, code="source.ranks-exchanged")


def _refuse_copies(files: Sequence[RankFile], where: str) -> None:
    # Ranks that differ in tp or pp hold different parts. Those that differ in ep alone may hold equal experts, copied from a dense model.
    seen: dict[tuple[tuple[str, int, int], ...], RankFile] = {}
    for file in files if all(file.archive.has_crc32 for file in files) else ():
        content = tuple(sorted((record.name, record.nbytes, record.crc32) for record in file.archive.records.values()))
        other = seen.setdefault(content, file)
        if (other.tp, other.pp) != (file.tp, file.pp):
            what = f"{other.folder} and {file.folder} hold the same file"
            raise FormatError(what, where=where, remedy=_REMEDY, code="source.ranks-exchanged")
