"""Which drill proves which checkpoint: the folder decides, not its name."""

from pathlib import Path

from tasks.drill_history import append_history, find_passed
from validators.drills.evidence import PastDrill


def _add(runs: Path, root: Path, name: str, *, green: bool) -> str:
    run_id = f"drill-{root.name}-{green}"
    append_history(runs, root, PastDrill(run_id, "2026-01-01T00:00:00+00:00", "D2", 5, green, "", 1.0, None, 1, (name,)))
    return run_id


def test_a_save_of_the_same_name_in_another_run_proves_nothing(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine" / "step-5", tmp_path / "other" / "step-5"
    for folder in (mine / "sharded", other):
        folder.mkdir(parents=True)
    _add(tmp_path, other.parent, "step-5", green=True)
    assert find_passed(tmp_path, mine) is None
    of_run = _add(tmp_path, mine.parent, "step-5", green=True)
    _add(tmp_path, mine.parent, "step-5", green=False)
    passed = find_passed(tmp_path, mine / "sharded")
    assert passed is not None
    assert passed.run_id == of_run


def test_a_save_drilled_by_itself_is_the_one(tmp_path: Path) -> None:
    alone, inner = tmp_path / "ckpt", tmp_path / "run" / "ckpt"
    for folder in (alone, inner):
        folder.mkdir(parents=True)
    _add(tmp_path, alone, "ckpt", green=True)
    assert find_passed(tmp_path, alone) is not None
    assert find_passed(tmp_path, inner) is None
