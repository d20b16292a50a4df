"""Recorded Megatron runs that were saved in both formats: equal tensors, equal moments; masters round to the weights."""

from pathlib import Path

import pytest

from tests.builders.cases import find_case
from tests.integration.megatron_pairs import hold_masters, hold_pair

pytestmark = pytest.mark.cases
PAIRS = [
    ("mg_llama_untied_tp2pp2_legacy", "mg_core0161_llama_tp2pp2_torchdist"),
    ("mg_mixtral_tp2ep2_etp1_legacy", "mg_mixtral_tp2ep2_etp1_torchdist"),
    ("mg_llama_distopt_tp2dp2_legacy", "mg_llama_distopt_tp2dp2_fully"),
]


def _save(name: str) -> Path:
    return Path(find_case(name)) / "ckpt"


@pytest.mark.parametrize(("legacy", "dist"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_both_formats_of_one_run_hold_the_same_tensors_and_moments(legacy, dist):
    hold_pair(_save(legacy), _save(dist))


@pytest.mark.parametrize("name", ["mg_llama_distopt_tp2dp2_legacy", "mg_llama_distopt_tp2dp2_fully"])
def test_masters_round_to_the_weights(name):
    hold_masters(_save(name))
