"""The negative proof: damaged copies of the newest save, which a drill must refuse, falling back to the save before.

A copy is a folder of links to the save's files, but for the one that is damaged. Files of several roots are in it side by side.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.errors import FormatError
from reports.paths import real_path
from tasks.engine.formats.readers import open_checkpoint
from tasks.links import link_save
from tasks.saves import list_saves
from validators.drills.evidence import Sabotage, Save

MAX_KEPT_NBYTES = 1_000_000  # of a truncated file


def _truncate(link: Path) -> None:
    target = real_path(link)
    link.unlink()
    with target.open("rb") as file:
        link.write_bytes(file.read(min(target.stat().st_size // 2, MAX_KEPT_NBYTES)))


def _empty(link: Path) -> None:
    link.unlink()
    link.touch()


# What is done to one file of values
DAMAGES: Mapping[str, Callable[[Path], None]] = MappingProxyType({"truncated": _truncate, "removed": Path.unlink, "emptied": _empty})


@task(name="sabotage", cache_policy=NO_CACHE)
def sabotage(newest: Save, older: Save | None, scratch: Path) -> tuple[Sabotage, ...]:
    """Show damaged copies of a save to the code that chooses one.

    Args:
        newest: a complete save.
        older: the one to fall back to, if there is any.
        scratch: an empty folder for the copies.

    Returns:
        One per kind of damage; none where the save's roots do not make one folder.
    """
    whole = link_save(newest, scratch / "whole")
    try:
        catalog = open_checkpoint(whole).catalog()
    except FormatError:
        if newest.also:
            return ()
        raise
    file = str((Path(catalog.root) / catalog.table.files[0]).relative_to(whole))
    return tuple(_try(name, damage, file, newest, older, scratch / name) for name, damage in DAMAGES.items())


def _try(name: str, damage: Callable[[Path], None], file: str, newest: Save, older: Save | None, root: Path) -> Sabotage:
    # Steps are named so that every format's root is recognised; the copies keep their order.
    for save, folder in ((older, "step-1"), (newest, "step-2")):
        if save is not None:
            link_save(save, root / folder)
    damage(root / "step-2" / file)
    saves = list_saves(root)
    damaged = next(save for save in saves.saves if save.name == "step-2")
    names = {"step-1": older.name if older else "", "step-2": newest.name}
    chosen = names[saves.complete()[-1].name] if saves.complete() else ""
    return Sabotage(f"{file} {name}", not damaged.is_complete, chosen, older.name if older else "", damaged.refusal)
