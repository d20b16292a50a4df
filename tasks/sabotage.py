"""The negative proof: damaged copies of the newest save, which a drill must refuse, falling back to the save before.

A copy is a folder of links to the save's files, but for the one that is damaged, so it costs nothing and touches nothing of the run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.saves import list_saves, open_save
from validators.drills.evidence import Sabotage, Save

MAX_KEPT_NBYTES = 1_000_000  # of a truncated file


def _truncate(link: Path) -> None:
    target = link.resolve()
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
        One per kind of damage.
    """
    catalog = open_save(newest).catalog()
    file = str((Path(catalog.root) / catalog.table.files[0]).relative_to(newest.path))
    return tuple(_try(name, damage, file, newest, older, scratch / name) for name, damage in DAMAGES.items())


def _try(name: str, damage: Callable[[Path], None], file: str, newest: Save, older: Save | None, root: Path) -> Sabotage:
    # Steps are named so that every format's root is recognised; the copies keep their order.
    for save, folder in ((older, "step-1"), (newest, "step-2")):
        if save is not None:
            _link(Path(save.path), root / folder)
    damage(root / "step-2" / file)
    saves = list_saves(root)
    damaged = next(save for save in saves.saves if save.name == "step-2")
    names = {"step-1": older.name if older else "", "step-2": newest.name}
    chosen = names[saves.complete()[-1].name] if saves.complete() else ""
    return Sabotage(f"{file} {name}", not damaged.is_complete, chosen, older.name if older else "", damaged.refusal)


def _link(save: Path, to: Path) -> None:
    for path in sorted(save.rglob("*")):
        if path.is_file():
            link = to / path.relative_to(save)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
