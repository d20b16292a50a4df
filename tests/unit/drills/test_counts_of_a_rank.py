"""torchtitan's saves count the tokens of one rank, the run's log and its owner's goals those of all: a drill holds them to one another."""

import pytest

from validators.drills.consistency import CHECK, ranks_counted
from validators.drills.evidence import Drilled, DrillEvidence, Save, Step
from validators.drills.facts import StateFacts
from validators.drills.goals import Goals, Numbers

PER_RANK, STEPS = 48, 3


def _found(tokens: int, ranks: int, name: str = "train_state.ntokens_seen", *, logged: bool = False) -> list[str]:
    values = {"train_state.step": STEPS, name: tokens}
    facts = StateFacts("dcp", "", STEPS, {}, values, (), {}, (), tuple(map(str, range(ranks))), 1)
    drilled = Drilled(Save("step-3", "", STEPS, "", "", 0.0, 0, ()), facts, (), None, 0, 0.0)
    log = tuple(Step(step, rank, tokens=PER_RANK) for step in range(1, STEPS + 1) for rank in range(ranks))
    goals = Goals() if logged else Goals(tokens_per_step=PER_RANK * 4)
    evidence = DrillEvidence("D2", (drilled.save,), "", (), (drilled,), goals, Numbers(), log=log if logged else ())
    return [one.code for one in CHECK.examine(evidence).findings]


@pytest.mark.parametrize(("tokens", "ranks"), [(144, 4), (144, 8), (288, 8), (576, 4), (576, 1)])
def test_a_count_of_one_rank_fits_the_tokens_of_all_steps(tokens, ranks):
    # 3 steps of 4 times 48 tokens are 576
    assert _found(tokens, ranks) == []


@pytest.mark.parametrize(("tokens", "ranks"), [(144, 1), (144, 2), (145, 4), (192, 4), (1152, 4), (0, 4), (96, 4)])
def test_a_count_that_no_number_of_the_ranks_makes_is_named(tokens, ranks):
    assert _found(tokens, ranks) == ["consistency.tokens"]


def test_a_count_under_another_name_is_of_the_whole_run():
    assert _found(144, 4, "consumed_tokens") == ["consistency.tokens"]
    assert _found(576, 4, "consumed_tokens") == []


@pytest.mark.parametrize(("tokens", "codes"), [(144, []), (576, []), (150, ["consistency.tokens-logged"])])
def test_a_count_of_one_rank_fits_what_all_ranks_logged(tokens, codes):
    assert _found(tokens, 4, logged=True) == codes


@pytest.mark.parametrize(
    ("tokens", "total", "ranks", "times"), [(10, 40, 8, 4), (10, 40, 6, 0), (10, 45, 8, 0), (10, 10, 1, 1), (0, 10, 8, 0)]
)
def test_how_many_ranks_make_a_total(tokens, total, ranks, times):
    assert ranks_counted(tokens, total, ranks) == times
