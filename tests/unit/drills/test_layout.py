"""Where each rank stands on the axes, for every format that tells it; what is not told is not guessed."""

import shutil
from pathlib import Path

import pytest

from tasks.engine.formats.readers import READERS, open_checkpoint
from tasks.engine.restoring.facts import gather_facts
from validators.drills.facts import StateFacts
from validators.drills.inventory import take_inventory
from validators.drills.layout import read_layout

GOLDEN = Path(__file__).parents[2] / "golden"


def _facts(kind: str, *, names: tuple[str, ...] = (), files: tuple[str, ...] = (), **values: int) -> StateFacts:
    return StateFacts(kind, "/save", 1, {}, {f"args.{name}": value for name, value in values.items()}, (), {}, files, names, 2)


def _megatron(**values: int) -> StateFacts:
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2, "world_size": 16}
    return _facts("megatron_dist", **sizes | values)


@pytest.mark.parametrize(
    ("changed", "rank", "coordinates"),
    [
        # 13 = tp 1 + 2 * (cp 0 + 2 * (dp 1 + 2 * pp 1))
        ({}, 13, {"tp": 1, "cp": 0, "dp": 1, "pp": 1}),
        ({}, 2, {"tp": 0, "cp": 1, "dp": 0, "pp": 0}),
        # 13 = tp 1 + 2 * (cp 0 + 2 * (pp 1 + 2 * dp 1)); 4 is the second stage, and not the second replica
        ({"use_tp_pp_dp_mapping": 1}, 13, {"tp": 1, "cp": 0, "pp": 1, "dp": 1}),
        ({"use_tp_pp_dp_mapping": 1}, 4, {"tp": 0, "cp": 0, "pp": 1, "dp": 0}),
        # experts: 13 = etp 0 + 1 * (ep 1 + 4 * (edp 1 + 2 * pp 1))
        (
            {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
            13,
            {"tp": 1, "cp": 0, "dp": 1, "pp": 1, "etp": 0, "ep": 1, "edp": 1},
        ),
    ],
)
def test_megatron_ranks_are_numbered_in_its_order(changed, rank, coordinates):
    layout = read_layout(_megatron(**changed))
    assert len(layout.ranks) == 16
    assert layout.ranks[rank].rank == rank
    assert dict(layout.ranks[rank].coordinates) == coordinates


def test_a_world_that_the_axes_do_not_divide_gives_no_ranks():
    layout = read_layout(_megatron(world_size=12))
    assert layout.ranks == ()
    assert layout.sizes["tp"] == 2


def test_a_legacy_rank_is_known_by_its_folder():
    layout = read_layout(gather_facts(open_checkpoint(GOLDEN / "megatron_llama_bf16_legacy" / "ckpt")))
    assert [(dict(row.coordinates), row.files) for row in layout.ranks] == [
        ({"tp": 0, "cp": 0, "dp": 0, "pp": 0}, "mp_rank_00"),
        ({"tp": 1, "cp": 0, "dp": 0, "pp": 0}, "mp_rank_01"),
        ({"tp": 0, "cp": 0, "dp": 1, "pp": 0}, "mp_rank_00"),
        ({"tp": 1, "cp": 0, "dp": 1, "pp": 0}, "mp_rank_01"),
    ]


def test_legacy_ranks_that_differ_in_dp_alone_share_a_folder():
    names = tuple(f"mp_rank_{tensor:02d}_{stage:03d}" for tensor in range(2) for stage in range(2))
    layout = read_layout(_facts("megatron", names=names, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, world_size=8))
    assert [row.files for row in layout.ranks] == [names[0], names[2], names[0], names[2], names[1], names[3], names[1], names[3]]


def test_in_a_zero_pipeline_the_model_rank_is_stage_and_tensor_rank():
    names = tuple(f"zero_pp_rank_{data}_mp_rank_{model:02d}" for data in range(2) for model in range(4))
    files = tuple(f"layer_{layer:02d}-model_{tensor:02d}-model_states.pt" for layer in range(3) for tensor in range(2))
    layout = read_layout(_facts("zero", names=names, files=files))
    assert dict(layout.sizes) == {"tp": 2, "dp": 2, "pp": 2}
    # DeepSpeed's grid is pipe, data, model: 6 = (pipe 1 * 2 + data 1) * 2 + model 0
    assert dict(layout.ranks[6].coordinates) == {"tp": 0, "dp": 1, "pp": 1}
    assert layout.ranks[6].files == "zero_pp_rank_1_mp_rank_02"


def test_eleven_zero_ranks_are_in_numeric_order():
    names = tuple(f"zero_pp_rank_{data}_mp_rank_00" for data in range(11))
    assert [row.files for row in read_layout(_facts("zero", names=names)).ranks] == list(names)


def test_a_dcp_save_with_fewer_data_positions_than_ranks_has_no_coordinates():
    facts = _facts("dcp", names=("__0", "__1", "__2", "__3"))
    shared = StateFacts(
        **{name: getattr(facts, name) for name in facts.__slots__} | {"keys": ("dataloader.dp_rank_0", "dataloader.dp_rank_1")}
    )
    layout = read_layout(shared)
    assert dict(layout.sizes) == {"dp": 2}
    assert [dict(row.coordinates) for row in layout.ranks] == [{}, {}, {}, {}]
    assert "2 data positions among 4 ranks" in layout.basis


@pytest.mark.parametrize(
    ("facts", "presence", "words"),
    [
        (_megatron(), "present", ("cp 2", "4 chunks", "i and 3-i", "mask")),
        (_megatron(context_parallel_size=1), "present", ("whole sequences",)),
        (_facts("zero", names=("zero_pp_rank_0_mp_rank_00",)), "missing", ("not recorded", "data position")),
    ],
)
def test_what_context_parallelism_changes_is_told(facts, presence, words):
    found = next(part for part in take_inventory(facts) if part.name == "context parallelism")
    assert found.presence == presence
    assert all(word in found.detail for word in words)


def test_every_format_says_something_of_its_layout():
    assert all(read_layout(_facts(kind.name)).basis for kind in READERS)


def test_ranks_of_rank_files_are_counted_once_and_sorted_as_numbers(tmp_path):
    save = tmp_path / "save"
    shutil.copytree(GOLDEN / "fsdp2_w4_llama_tied_bf16" / "ckpt", save)
    assert gather_facts(open_checkpoint(save)).rank_names == ("__0", "__1", "__2", "__3")
