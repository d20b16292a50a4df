"""Planted faults of Megatron's ranks and of how they are read: what a whole export, with no logits recorded, must say of each.

Faults *by a rule* or *by the reader* make the product's own mapping wrong. A wrong rule is followed by the second path too, which takes the
plan at its word; a wrong reader is not. What the ranks compute by themselves contradicts both. Faults *of the source* are a save, or a
config beside it, that is not what the trainer's model was: it is refused before anything is published.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from tasks.engine.families import families
from tasks.engine.families.decoder import EMBEDDING, HEAD
from tasks.engine.formats import megatron, megatron_cuts, megatron_names
from tasks.engine.tensors.ops import Op, SplitQkv, SplitRows
from tasks.engine.tensors.region import Region
from tasks.engine.tensors.rules import Drop, Naming, Rule
from tests.builders.megatron import Grid, Model, edit_rank
from tests.builders.megatron_dist import write_torch_dist
from tests.builders.megatron_runs import RUN, settings

DENSE = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
EVEN = replace(DENSE, heads=2)  # as many Q rows as K rows: blocks of them are equal thirds
EXPERTS = replace(DENSE, ffn=8, experts=4)
TIED = replace(DENSE, tied=True)
NATIVE = "mapping: merged values against native forward"
Patch = Callable[[pytest.MonkeyPatch], None]
Damage = Callable[[Path], None]


@dataclass(frozen=True)
class RankFault:
    """One way the ranks are wrong or read wrongly. `patch` makes the product wrong, `damage` the folder of save (`ckpt`) and config (`hf`).

    `code` must be in the report, at `where`, and `said` must all be in what it found.
    """

    name: str
    model: Model
    grid: Grid
    by: Literal["a rule", "the reader", "the source"]
    patch: Patch | None = None
    damage: Damage | None = None
    code: str = "logits.mean-kl"
    where: str = NATIVE
    said: tuple[str, ...] = ("first diverging layer",)


def _rules(change: Callable[[Rule], Rule]) -> Patch:
    """Change the rules of every family's Megatron naming."""

    def wrong(row: Rule | Drop) -> Rule | Drop:
        return change(row) if isinstance(row, Rule) else row

    def namings(family: families.Family) -> tuple[Naming, ...]:
        return tuple(Naming(n.name, tuple(map(wrong, n.rows))) if n.name == "megatron" else n for n in family.namings)

    made = tuple(replace(family, namings=namings(family)) for family in families.FAMILIES)
    return lambda patch: patch.setattr(families, "FAMILIES", made)


def _exchanged(first: str, second: str) -> Callable[[Rule], Rule]:
    """Exchange two texts in the targets of rules."""
    swapped = {first: second, second: first}

    def target(name: str) -> str:
        return next((name.replace(text, other) for text, other in swapped.items() if text in name), name)

    return lambda rule: Rule(rule.source, tuple(map(target, rule.targets)), rule.op)


def _with_op(wrong: type[Op], op: Op) -> Callable[[Rule], Rule]:
    return lambda rule: Rule(rule.source, rule.targets, op) if isinstance(rule.op, wrong) else rule


def _fc1_plainly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(megatron_cuts, "_gated", lambda tensor, rank, ranks: megatron_cuts._cut(tensor, 0, rank, ranks))


def _ranks_backwards(text: str) -> Patch:
    """Take the ranks of some parameters in the wrong order."""

    def wrong(name, tensors, rank, ranks, declared, where):
        return megatron_cuts.place_part(name, tensors, ranks - 1 - rank if text in name else rank, ranks, declared, where)

    return lambda patch: patch.setattr(megatron, "place_part", wrong)


def _stages_one_by_one(patch: pytest.MonkeyPatch) -> None:
    right = megatron.number_layers

    def wrong(ranks, where):
        starts = right(ranks, where)
        return dict(zip(sorted(starts), sorted(starts.values()), strict=True))  # by pipeline stage, then by virtual stage

    patch.setattr(megatron, "number_layers", wrong)


def _experts(number: Callable[[int, int], int]) -> Patch:
    """Number experts by (local number, experts before this rank) in a wrong way."""

    def wrong(name: str, first_layer: int, first_expert: int) -> str:
        name = megatron_names.globalise(name, first_layer, 0)
        return megatron_names._LOCAL_EXPERT.sub(lambda m: f".local_experts.{number(int(m[1]), first_expert)}.", name)

    return lambda patch: patch.setattr(megatron, "globalise", wrong)


def _vocabulary_from_the_end(patch: pytest.MonkeyPatch) -> None:
    right = megatron_cuts._cut

    def wrong(tensor, dim, rank, ranks):
        whole = right(tensor, dim, rank, ranks)
        (part,) = whole.parts
        if whole.shape != (DENSE.padded, DENSE.hidden):
            return whole
        rows = whole.shape[0] // ranks
        moved = Region(((part.region.offset[0] + rows) % whole.shape[0], 0), part.region.shape)
        return replace(whole, parts=(replace(part, region=moved),))

    patch.setattr(megatron_cuts, "_cut", wrong)


def _head_of_embedding(patch: pytest.MonkeyPatch) -> None:
    right = megatron.collect_pieces

    def wrong(ranks, where, held):
        made = dict(right(ranks, where, held))
        return made | {"output_layer.weight": made["embedding.word_embeddings.weight"]}

    patch.setattr(megatron, "collect_pieces", wrong)


def _config(**changed: object) -> Damage:
    return lambda folder: (folder / "hf/config.json").write_text(json.dumps(settings(DENSE) | changed)) and None


def _drift(rank: str, name: str) -> Damage:
    """Add one to what a rank holds of a parameter."""
    return lambda folder: edit_rank(folder / "ckpt" / rank, lambda held: held["model"][name].add_(1))


def _swap_files(folder: Path) -> None:
    first, second = (folder / "ckpt" / rank / "model_optim_rng.pt" for rank in ("mp_rank_00", "mp_rank_01"))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def _copy_file(folder: Path) -> None:
    first, second = (folder / "ckpt" / rank / "model_optim_rng.pt" for rank in ("mp_rank_00", "mp_rank_01"))
    second.write_bytes(first.read_bytes())


def _file_of_another_save(folder: Path) -> None:
    # torch_dist: the items of that file have sound checksums, and the same sizes at the same places.
    shutil.rmtree(folder / "ckpt")
    write_torch_dist(folder / "ckpt", DENSE, replace(TP, args=RUN))
    write_torch_dist(folder / "other", replace(DENSE, seed=1), replace(TP, args=RUN))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / "ckpt").iterdir()}
    (folder / "ckpt/integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": digests}))
    shutil.copy(folder / "other/__1_0.distcp", folder / "ckpt/__1_0.distcp")


def _mapping(name: str, model: Model, grid: Grid, by: Literal["a rule", "the reader"], patch: Patch) -> RankFault:
    return RankFault(name, model, grid, by, patch)


def _source(name: str, model: Model, grid: Grid, damage: Damage, code: str, where: str, *said: str) -> RankFault:
    return RankFault(name, model, grid, "the source", None, damage, f"source.{code}", where, said)


TP, EP, PP = Grid(tp=2), Grid(ep=2), Grid(pp=2)
_NORM, _HEAD = "decoder.layers.1.input_layernorm.weight", "output_layer.weight"
_THETA = {"rope_theta": 500000.0, "rope_type": "default"}
FAULTS: tuple[RankFault, ...] = (
    _mapping("gate_and_up_exchanged", DENSE, TP, "a rule", _rules(_exchanged("gate_proj", "up_proj"))),
    _mapping("norms_exchanged", DENSE, TP, "a rule", _rules(_exchanged("input_layernorm", "post_attention_layernorm"))),
    _mapping("qkv_taken_for_blocks", EVEN, TP, "a rule", _rules(_with_op(SplitQkv, SplitRows()))),
    _mapping("q_and_k_rows_permuted", DENSE, TP, "a rule", _rules(_with_op(SplitQkv, SplitQkv(rope_pairs=True)))),
    _mapping("head_and_embedding_exchanged", DENSE, TP, "a rule", _rules(_exchanged(EMBEDDING, HEAD))),
    _mapping("gate_and_up_of_experts_exchanged", EXPERTS, EP, "a rule", _rules(_exchanged(".w1.", ".w3."))),
    _mapping("fc1_joined_plainly", DENSE, TP, "the reader", _fc1_plainly),
    _mapping("kv_ranks_swapped", DENSE, TP, "the reader", _ranks_backwards("linear_qkv")),
    _mapping("row_parallel_ranks_swapped", DENSE, TP, "the reader", _ranks_backwards("linear_proj")),
    _mapping("virtual_stages_one_by_one", DENSE, Grid(pp=2, vpp=2), "the reader", _stages_one_by_one),
    _mapping("expert_ranks_swapped", EXPERTS, EP, "the reader", _experts(lambda local, first: local + 2 - first)),
    _mapping("experts_dealt_one_by_one", EXPERTS, EP, "the reader", _experts(lambda local, first: 2 * local + first // 2)),
    _mapping("head_replaced_by_embedding", DENSE, TP, "the reader", _head_of_embedding),
    _mapping("vocabulary_cut_from_the_end", DENSE, TP, "the reader", _vocabulary_from_the_end),
    _source(
        "vocabulary_longer_than_stored", DENSE, TP, _config(vocab_size=40), "vocabulary-short", "embedding.word_embeddings.weight", "40"
    ),
    _source("eps_changed", DENSE, TP, _config(rms_norm_eps=1e-6), "config-contradicts", "config.json", "eps is 1e-06", "1e-05"),
    _source("theta_changed", DENSE, TP, _config(rope_parameters=_THETA), "config-contradicts", "config.json", "rope_theta is 500000"),
    _source("heads_of_another_size", DENSE, TP, _config(num_attention_heads=2), "config-contradicts", "config.json", "num_heads is 2"),
    _source("norms_differ", DENSE, TP, _drift("mp_rank_01", _NORM), "replicas-differ", _NORM, "mp_rank_01", "mp_rank_00"),
    _source("dense_weights_differ", EXPERTS, EP, _drift("mp_rank_00_001", _NORM), "replicas-differ", _NORM, "_001", "_000"),
    _source("files_exchanged", DENSE, TP, _swap_files, "ranks-exchanged", "ckpt", "by rank 1", "mp_rank_00", "mp_rank_01"),
    _source("file_copied_over_another", DENSE, TP, _copy_file, "ranks-exchanged", "ckpt", "mp_rank_00 and mp_rank_01"),
    _source("data_file_of_another_save", DENSE, TP, _file_of_another_save, "file-changed", "ckpt", "__1_0.distcp"),
    _source("tied_copy_drifted", TIED, PP, _drift("mp_rank_00_001", _HEAD), "tied-copy-differs", _HEAD, "row 0"),
)

# The faults that converters are known for, by the name of the row that plants each.
CLASSICS: dict[str, str] = {
    "fc1 concatenated plainly": "fc1_joined_plainly",
    "gate and up swapped": "gate_and_up_exchanged",
    "QKV as blocks": "qkv_taken_for_blocks",
    "KV ranks swapped": "kv_ranks_swapped",
    "layers exchanged by VPP order": "virtual_stages_one_by_one",
    "EP order": "expert_ranks_swapped",
    "strided experts": "experts_dealt_one_by_one",
    "head replaced by embedding": "head_replaced_by_embedding",
    "eps changed": "eps_changed",
    "theta changed": "theta_changed",
    "vocabulary cut wrong": "vocabulary_cut_from_the_end",
    "norm replicas differing": "norms_differ",
}
