"""Under random histories, policies and crashes nothing goes that must stay, and what is done is what the dry run said."""

import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import retain as retain_steps
from tasks.retain import apply_plan, plan_root
from tests.builders.many_saves import names_in, report_on, trainers_save, verify
from validators.retention.evidence import THINNED, Claim, Pin, RetentionPlan, SeenSave
from validators.retention.plan import MIN_VERIFIED, RetentionEvidence, plan_retention
from validators.retention.policy import PinRow, RetentionPolicy

STEPS = st.lists(st.integers(1, 200), min_size=1, max_size=30, unique=True).map(sorted)


@st.composite
def policies(draw) -> RetentionPolicy:
    """Any policy."""
    pins = draw(st.lists(st.integers(0, 220), max_size=3))
    return RetentionPolicy(
        keep_last=draw(st.integers(1, 4)),
        every_steps=draw(st.sampled_from([0, 1, 7, 50])),
        every_tokens=draw(st.sampled_from([0, 300])),
        milestones=tuple(draw(st.lists(st.integers(0, 220), max_size=3))),
        pins=tuple(PinRow(step=step, because="asked") for step in pins),
        weights_only_every_steps=draw(st.sampled_from([0, 20])),
        budget_nbytes=draw(st.sampled_from([0, 25, 1000])),
        tokens_per_step=10,
    )


@st.composite
def histories(draw) -> tuple[RetentionEvidence, frozenset[str]]:
    """Any run, and the names of saves that look whole and are not."""
    steps = draw(STEPS)
    some = st.lists(st.sampled_from(steps), max_size=5)
    broken, incomplete, verified, claimed = (set(draw(some)) for _ in range(4))
    saves = tuple(
        SeenSave(
            f"step-{step}",
            step,
            draw(st.integers(1, 20)),
            float(draw(st.sampled_from([step, 300 - step]))),  # in the order of steps, or as a run that went back leaves them
            draw(st.sampled_from(["cut short", THINNED])) if step in incomplete else "",
            tokens=10 * step,
            thinnable=("optimizer.pt",) if draw(st.booleans()) else (),
        )
        for step in steps
    )
    claims = tuple(Claim(f"step-{step}", "named") for step in claimed)
    pins = tuple(Pin(step, step + 3, "beside a spike") for step in draw(st.lists(st.integers(0, 220), max_size=2)))
    evidence = RetentionEvidence("/run", saves, claims, pins, frozenset(f"step-{step}" for step in verified))
    return evidence, frozenset(f"step-{step}" for step in broken)


@given(histories(), policies())
@settings(max_examples=400, deadline=None)
def test_nothing_goes_that_must_stay(history, policy):
    evidence, broken = history
    plan = plan_retention(evidence, policy, lambda save: save.name not in broken, lambda save: bool(save.thinnable))
    acted = {decision.name for decision in plan.decisions if decision.action != "keep"}
    whole = [save for save in evidence.saves if save.is_complete and save.name not in broken]
    verified = [save.name for save in whole if save.name in evidence.verified]
    assert [decision.name for decision in plan.decisions] == [save.name for save in evidence.saves]
    assert not acted & {save.name for save in evidence.saves if not save.is_complete and not save.is_half_thinned}
    assert max(evidence.saves, key=lambda save: (save.saved_at, save.step)).name not in acted
    assert not acted & {claim.name for claim in evidence.claims}
    assert not acted & {save.name for save in (evidence.saves[-1:] + tuple(whole[-policy.keep_last :]))}
    assert not acted & set(verified[-MIN_VERIFIED:])
    assert len(verified) >= MIN_VERIFIED or not acted
    for pin in (*evidence.pins, *(Pin(row.step, row.step, "") for row in policy.pins), *(Pin(m, m, "") for m in policy.milestones)):
        beside = [save.name for save in whole if save.step <= pin.before][-1:] + [s.name for s in whole if s.step >= pin.after][:1]
        assert not acted & set(beside)
    assert all(decision.because for decision in plan.decisions)


@given(histories(), policies())
@settings(max_examples=200, deadline=None)
def test_a_plan_made_again_after_it_was_carried_out_has_nothing_left_to_do(history, policy):
    # Kept saves stay kept: no second run eats into what the first one left. A budget keeps what fits, and more fits afterwards.
    evidence, broken = history
    plan = plan_retention(evidence, policy, lambda save: save.name not in broken, lambda save: bool(save.thinnable))
    kept = {decision.name for decision in plan.of("keep")}
    thinned = {decision.name for decision in plan.of("thin")}
    left = (replace(save, cause=THINNED, thinnable=()) if save.name in thinned else save for save in evidence.saves)
    after = replace(evidence, saves=tuple(save for save in left if save.name in kept | thinned))
    again = plan_retention(after, policy, lambda save: save.name not in broken, lambda save: bool(save.thinnable))
    assert again.of("go") == again.of("thin") == ()


class Crash(BaseException):
    """A process that ends in the middle."""


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_what_is_done_is_what_the_dry_run_said_however_often_it_crashes(data):
    with tempfile.TemporaryDirectory() as base:
        root, runs = Path(base) / "run", Path(base) / "runs"
        steps = data.draw(STEPS)
        for step in steps:
            trainers_save(root / f"step-{step}")
        chosen = data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=4))
        verify(root, runs, [f"step-{step}" for step in chosen])
        named = f"step-{data.draw(st.sampled_from(steps))}"
        report_on(runs, "export-1", f"{root}/{named} (step)")
        policy = data.draw(policies())
        before = names_in(root)
        dry = plan_root(root.resolve(), policy, (), runs).plan
        _apply_with_crashes(root.resolve(), policy, runs, data.draw(st.integers(0, 2**32)))
        assert names_in(root) == before - {decision.name for decision in dry.of("go")}
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        thinned = {path.parent.name for path in root.glob("*/shardwright.thinned.json")}
        assert thinned == {decision.name for decision in dry.of("thin")}
        last_two = [f"step-{step}" for step in sorted({*chosen})[-MIN_VERIFIED:]]
        for name in {named, f"step-{max(steps)}", *last_two}:
            assert {path.name for path in (root / name).iterdir()} == WHOLE
        for name in thinned:
            assert {path.name for path in (root / name).iterdir() if not path.name.startswith(".")} == WHOLE - STATE | {MARK}


MARK, STATE = "shardwright.thinned.json", {"optimizer.pt", "scheduler.pt"}
WHOLE = STATE | {"model.safetensors", "trainer_state.json"}


def _apply_with_crashes(root: Path, policy: RetentionPolicy, runs: Path, seed: int) -> RetentionPlan:
    # Each deletion of a file, and each renaming, may be the last thing a process does; the next process plans anew.
    chance, crashing = random.Random(seed), pytest.MonkeyPatch()
    rmtree, unlink, rename = shutil.rmtree, Path.unlink, Path.rename

    def crash(path: Path) -> None:
        if root in path.parents and chance.random() < 0.1:
            raise Crash

    def remove(path: Path, **options: object) -> None:
        if root not in Path(path).parents:
            return rmtree(path, **options)
        for file in sorted(Path(path).iterdir()):
            crash(file)
            unlink(file)
        return rmtree(path)

    while True:
        crashing.setattr(retain_steps.shutil, "rmtree", remove)
        crashing.setattr(Path, "unlink", lambda path, **options: (crash(path), unlink(path, **options)))
        crashing.setattr(Path, "rename", lambda path, target: (rename(path, target), crash(path)))
        try:
            planned = plan_root(root, policy, (), runs)
            assert apply_plan(root, planned, runs) == ()
        except Crash:
            continue
        finally:
            crashing.undo()
        return planned.plan
