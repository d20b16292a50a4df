"""Recorded Megatron runs: both formats of one run hold equal tensors and moments, masters round to the weights, and weights that are
written as ranks again are the files that Megatron itself wrote.
"""

from pathlib import Path

import pytest

from flows.reshard_megatron import MegatronRequest, write_megatron_save
from tests.builders.cases import find_case
from tests.builders.megatron_files import differences, load_rank
from tests.builders.released import expected_tensors, write_release
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


# Arguments that differ without harm: of the run, under an old name, or of no meaning without groups or dense layers.
OF_NO_WEIGHT = {"iteration", "consumed_train_samples", "world_size", "norm_epsilon", "num_query_groups", "ffn_hidden_size"}
LAYOUTS = {
    "mg_llama_untied_tp2pp2_legacy": {"tp": 2, "pp": 2},
    "mg_llama_untied_vpp2pp2_legacy": {"pp": 2, "vpp": 2},
    "mg_gpt2_tied_tp2pp2_legacy": {"tp": 2, "pp": 2},
    "mg_mixtral_pp2ep2_legacy": {"pp": 2, "ep": 2},
    "mg_mixtral_tp2ep2_etp1_legacy": {"tp": 2, "ep": 2, "etp": 1},
    "mg_llama_distopt_tp2dp2_legacy": {"tp": 2},
}


@pytest.mark.parametrize("source", ["hf", "ranks", "ranks of another layout"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_written_as_ranks_are_megatrons_own_files(name, source, tmp_path):
    case = Path(find_case(name))
    (theirs,) = (case / "ckpt").glob("iter_*")
    ranks = {"tp": 1, "pp": 1, "ep": 1, "vpp": 1, **LAYOUTS[name]}
    root = theirs
    if source == "hf":
        root = write_release(tmp_path / "hf", expected_tensors(case, without_tied_head="tied_" in name and "untied" not in name))
    if source == "ranks of another layout":
        root = _write(theirs, case, {"tp": 4, "pp": 1, "ep": 1, "etp": 2, "vpp": 1}, tmp_path / "other")
    made = _write(root, case, {**ranks, "etp": ranks.get("etp", ranks["tp"])}, tmp_path / "made")
    assert differences(made / "release", theirs, 90) == []
    ours, own = (vars(load_rank(next(iter(sorted(save.glob("mp_rank_*")))))["args"]) for save in (made / "release", theirs))  # type: ignore[arg-type]
    assert {argument for argument in ours if ours[argument] != own.get(argument)} <= OF_NO_WEIGHT


def _write(source: Path, case: Path, ranks: dict[str, int], folder: Path) -> Path:
    folder.mkdir()
    write_megatron_save(MegatronRequest(source, (), None, "", case / "hf", "auto", ranks, vocab_multiple=32), folder)
    return folder
