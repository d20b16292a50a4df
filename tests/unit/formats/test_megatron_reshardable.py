"""Buckets of torch_dist's `dp_reshardable` optimizers: which parameter each element is of, rebuilt from Megatron's orders."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from tasks.engine.formats.readers import open_checkpoint
from tests.builders.megatron import Grid, Model
from tests.builders.megatron_dist import SLOTS, write_torch_dist
from tests.contract.assembled import assemble, same_bytes

DENSE = Model(dtype=torch.bfloat16)
LOCAL, ENGINE = {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"}
LAYOUTS = {
    "one_rank": (DENSE, Grid(args=LOCAL)),
    "tp_pp": (replace(DENSE, qkv_bias=True), Grid(tp=2, pp=2, args=LOCAL)),
    "transformer_engine": (replace(DENSE, qk_norm=True), Grid(tp=2, args=ENGINE)),
    "vpp": (DENSE, Grid(tp=2, pp=2, vpp=2, args=LOCAL | {"virtual_pipeline_model_parallel_size": 2})),
    "uneven": (DENSE, Grid(pp=3, stages=((0, 3, 1),), args=LOCAL)),
    "tied_pp": (replace(DENSE, tied=True, padded=12), Grid(pp=2, args=ENGINE)),
    "buckets": (DENSE, Grid(tp=2, args=LOCAL | {"ddp_bucket_size": 100})),
    "tied_buckets": (replace(DENSE, tied=True, padded=12), Grid(pp=2, args=LOCAL | {"ddp_bucket_size": 150})),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_slot_is_found_by_its_parameter(layout, tmp_path):
    model, grid = LAYOUTS[layout]
    write_torch_dist(tmp_path, model, grid, optimizer="buckets")
    reader = open_checkpoint(tmp_path)
    catalog = reader.catalog()
    assert [note for note in catalog.notes if "not told apart" in note] == []
    names = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    assert set(catalog.state_tensors) == {f"{slot}/{name}" for slot in names.values() for name in catalog.tensors}
    for name, tensor in catalog.tensors.items():
        value = assemble(reader, name, tensor.shape)
        for slot, factor in SLOTS.items():
            assert same_bytes(assemble(reader, f"{names[slot]}/{name}", tensor.shape), value.float() * factor), (slot, name)


def _edit(folder, change) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata.state_dict_metadata)
    path.write_bytes(pickle.dumps(metadata))


def _some(items, part: str) -> str:
    return next(key for key in items if key.startswith("optimizer.distributed.") and key.endswith(part))


def _join_chunks(items) -> None:
    for slot in SLOTS:
        key = _some(items, f"bucket_idx_0.{slot}")
        items[key].chunks = [ChunkStorageMetadata(torch.Size((0,)), items[key].size)]


def _lengthen(items) -> None:
    for slot in SLOTS:
        key = _some(items, f"bucket_idx_0.{slot}")
        size = torch.Size((items[key].size[0] + 64,))
        items[key] = TensorStorageMetadata(items[key].properties, size, items[key].chunks)


UNFIT = {
    "buckets of another length": (_lengthen, "no number of layers fills"),
    "chunks cut elsewhere": (_join_chunks, "cut elsewhere"),
    "a slot that is missing": (lambda items: items.pop(_some(items, ".exp_avg")), "does not hold the same buckets"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_buckets_that_do_not_fit_the_model_are_listed_and_noted(case, tmp_path):
    change, said = UNFIT[case]
    write_torch_dist(tmp_path, DENSE, Grid(tp=2, args=LOCAL), optimizer="buckets")
    whole = open_checkpoint(tmp_path).catalog()
    _edit(tmp_path, change)
    catalog = open_checkpoint(tmp_path).catalog()
    assert catalog.tensors.keys() == whole.tensors.keys()
    assert all(key.startswith("other/") for key in catalog.state_tensors)
    assert [note for note in catalog.notes if said in note]


@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        (DENSE, {}, "transformer_impl=None"),
        (DENSE, LOCAL | {"virtual_pipeline_model_parallel_size": 2}, "buckets of 1 buffers, the run has 2"),
        (DENSE, LOCAL | {"pipeline_model_parallel_size": 2}, "buckets of 1 buffers, the run has 2"),
    ],
)
def test_args_of_another_run_are_noted(model, args, said, tmp_path):
    write_torch_dist(tmp_path, model, Grid(args=LOCAL), optimizer="buckets")
    write_torch_dist(tmp_path / "other", model, Grid(args=args), optimizer="", common="file")
    (tmp_path / "other" / "common.pt").rename(tmp_path / "common.pt")
    catalog = open_checkpoint(tmp_path).catalog()
    assert [note for note in catalog.notes if said in note]
    assert all(key.startswith("other/") for key in catalog.state_tensors)
