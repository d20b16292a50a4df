"""A wrong mapping, planted as a checkpoint that a right one reads wrongly: nothing but the trainer's logits can tell, and they do.

Each fault rearranges what the ranks stored as the classic mistakes of converters rearrange it. Shapes, names, copies and the second path
agree; the logits recorded from the sound model do not.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flows.export import NotPublishedError, run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from reports.errors import ReleaseError
from tests.builders.megatron import Grid, Model, edit_rank
from tests.builders.megatron_runs import RUN, prepare, settings

pytestmark = pytest.mark.slow

DENSE = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=24, vocab=20, padded=32)
EXPERTS = Model(hidden=16, heads=4, groups=2, head_dim=4, ffn=8, vocab=20, padded=32, experts=4)
Held = dict[str, torch.Tensor]


def _export(folder: Path) -> None:
    request = ExportRequest(
        source=folder / "ckpt",
        to=folder / "out",
        assets=folder / "hf",
        golden=folder / "golden.safetensors",
        dtype="fp32",
        fsync=False,
        skip=["tokenizer=none here", "duplicates=small numbers"],
        runs=folder / "runs",
    )
    assert run_export(request, PlainRunner(), Silent()).verdict.green


def _on_every_rank(change: Callable[[Held], object]) -> Callable[[Path], None]:
    def plant(save: Path) -> None:
        for rank in sorted(save.iterdir()):
            edit_rank(rank, lambda held: [change(held[key]) for key in held if key.startswith("model")])

    return plant


def _each(suffix: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return _on_every_rank(lambda held: held.update({n: make(t).clone() for n, t in held.items() if n.endswith(suffix)}))


def _halves(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2)[::-1])


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    # What a reader of one rank's [Q; K; V] blocks would take for groups: one KV head per rank here.
    return torch.cat([weight[8:12], weight[12:16], weight[:8]])


def _exchange(one: str, other: str, *, names: str = "") -> Callable[[Path], None]:
    def plant(save: Path) -> None:
        held: list[dict] = []
        for rank in (one, other):
            edit_rank(save / rank, lambda content: held.append({k: v for k, v in content.items() if k.startswith("model")}))
        for rank, theirs in ((one, held[1]), (other, held[0])):
            edit_rank(save / rank, lambda content, theirs=theirs: [
                content[key].update({n: v for n, v in chunk.items() if names in n and v is not None}) for key, chunk in theirs.items()
            ])  # fmt: skip

    return plant


def _swap_chunks(content: dict) -> None:
    def layers(key: str) -> dict:
        return {n: v for n, v in content[key].items() if n.startswith("decoder.layers.")}

    first, second = layers("model0"), layers("model1")
    content["model0"].update(second)
    content["model1"].update(first)


def _fc1_plainly(save: Path) -> None:
    # What ranks would hold if the whole [gate; up] had been cut plainly: gate rows on one rank, up rows on the other.
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(DENSE.layers)]
    held: list[dict] = []
    for rank in ("mp_rank_00", "mp_rank_01"):
        edit_rank(save / rank, lambda content: held.append({n: content["model"][n] for n in names}))
    for part, rank in enumerate(("mp_rank_00", "mp_rank_01")):
        plain = {n: torch.cat([held[0][n].chunk(2)[part], held[1][n].chunk(2)[part]]) for n in names}
        edit_rank(save / rank, lambda content, plain=plain: content["model"].update(plain))


def _strided_experts(save: Path) -> None:
    # Experts dealt out one by one instead of in blocks: rank 0 holds 0 and 2.
    held: list[dict] = []
    for rank in ("mp_rank_00_000", "mp_rank_00_001"):
        edit_rank(save / rank, lambda content: held.append(dict(content["model"])))
    for name in [n for n in held[0] if ".local_experts.1." in n]:
        other = name.replace(".local_experts.1.", ".local_experts.0.")
        edit_rank(save / "mp_rank_00_000", lambda content, name=name, other=other: content["model"].update({name: held[1][other]}))
        edit_rank(save / "mp_rank_00_001", lambda content, name=name, other=other: content["model"].update({other: held[0][name]}))


def _head_of_embedding(held: Held) -> None:
    held["output_layer.weight"] = held["embedding.word_embeddings.weight"].clone()


FAULTS: dict[str, tuple[Model, Grid, Callable[[Path], None]]] = {
    "fc1 cut plainly": (DENSE, Grid(tp=2), _fc1_plainly),
    "gate and up exchanged": (DENSE, Grid(tp=2), _each("linear_fc1.weight", _halves)),
    "QKV taken for blocks": (DENSE, Grid(tp=2), _each("linear_qkv.weight", _blocks)),
    "KV ranks exchanged": (DENSE, Grid(tp=2), _exchange("mp_rank_00", "mp_rank_01", names="linear_qkv.weight")),
    "virtual stages exchanged": (DENSE, Grid(pp=2, vpp=2), lambda save: edit_rank(save / "mp_rank_00_000", _swap_chunks)),
    "pipeline stages exchanged": (DENSE, Grid(pp=2), _exchange("mp_rank_00_000", "mp_rank_00_001", names="decoder.layers")),
    "expert ranks exchanged": (EXPERTS, Grid(ep=2), _exchange("mp_rank_00_000", "mp_rank_00_001", names=".local_experts.")),
    "experts dealt out one by one": (EXPERTS, Grid(ep=2), _strided_experts),
}


@pytest.mark.parametrize(("model", "grid"), [(DENSE, Grid(tp=2, pp=2)), (EXPERTS, Grid(ep=2))], ids=["dense", "experts"])
def test_a_sound_save_is_released(model, grid, tmp_path):
    prepare(tmp_path, model, Grid(**{**grid.__dict__, "args": RUN}))
    _export(tmp_path)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("fault", FAULTS)
def test_recorded_logits_catch_a_wrong_mapping(fault, tmp_path):
    model, grid, plant = FAULTS[fault]
    prepare(tmp_path, model, Grid(**{**grid.__dict__, "args": RUN}))
    plant(tmp_path / "ckpt")
    with pytest.raises(NotPublishedError, match=r"logits\.mean-kl"):
        _export(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_head_replaced_by_the_embedding_is_caught(tmp_path):
    prepare(tmp_path, DENSE, Grid(tp=2, args=RUN))
    _on_every_rank(_head_of_embedding)(tmp_path / "ckpt")
    with pytest.raises(NotPublishedError, match=r"logits\.mean-kl"):
        _export(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rms_norm_eps": 1e-6}, "eps"),
        ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, "rope_theta"),
        ({"vocab_size": 40}, "fewer rows"),
        ({"num_attention_heads": 2, "head_dim": 8}, "num_heads"),
    ],
)
def test_a_config_that_is_not_the_models_is_refused_before_anything_is_written(changed, said, tmp_path):
    prepare(tmp_path, DENSE, Grid(tp=2, args=RUN))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings(DENSE) | changed))
    with pytest.raises(ReleaseError, match=said):
        _export(tmp_path)


def test_a_vocabulary_cut_too_short_shows_in_the_logits(tmp_path):
    prepare(tmp_path, DENSE, Grid(tp=2, args=RUN))
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings(DENSE) | {"vocab_size": 18}))
    with pytest.raises(ReleaseError, match="logits"):
        _export(tmp_path)


def test_norms_that_differ_between_ranks_are_refused(tmp_path):
    prepare(tmp_path, DENSE, Grid(tp=2, args=RUN))
    name = "decoder.layers.1.input_layernorm.weight"
    edit_rank(tmp_path / "ckpt" / "mp_rank_01", lambda held: held["model"][name].add_(1))
    with pytest.raises(ReleaseError, match=rf"{name}: .*mp_rank_01.* and mp_rank_00"):
        _export(tmp_path)
