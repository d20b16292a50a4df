"""What every row of READERS must do, on checkpoints written by the formats' own writers. A new row is tested by being a row."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reports.errors import FormatError
from tasks.engine.formats.reader import CheckpointReader, Source
from tasks.engine.formats.readers import READERS, open_checkpoint
from tests.builders import hf as hf_builder
from tests.builders import universal as universal_builder
from tests.builders import zero as zero_builder
from tests.builders.megatron import Grid, Model, write_legacy
from tests.builders.megatron_dist import write_torch_dist
from tests.contract.assembled import assemble, read_values, same_bytes

# reader → layouts of tests.builders.dcp it reads
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dcp": ("fsdp2", "hsdp", "tp_fsdp", "torchtitan", "accelerate", "fsdp1"),
    "dcp_hf": ("dcp_hf",),
    "fsdp1_ranks": ("fsdp1_sharded_tensors", "fsdp1_dtensors", "hsdp_dtensors", "tp_fsdp_dtensors"),
}


def _hf(write: Callable[[Path], object]) -> Callable[[Path], dict[str, torch.Tensor]]:
    def build(folder: Path) -> dict[str, torch.Tensor]:
        write(folder)
        return dict(hf_builder.WEIGHTS)

    return build


def _zero(stage: int, world: int, **layout: object) -> Callable[[Path], dict[str, torch.Tensor]]:
    def build(folder: Path) -> dict[str, torch.Tensor]:
        save = zero_builder.example(stage, world, **layout)
        zero_builder.write_zero(folder, save)
        return save.truth

    return build


def _universal(stage: int, **options: int) -> Callable[[Path], dict[str, torch.Tensor]]:
    def build(folder: Path) -> dict[str, torch.Tensor]:
        save = zero_builder.example(stage, 2)
        universal_builder.write_universal(folder, save, **options)
        return universal_builder.universal_truth(save)

    return build


def _megatron(model: Model, grid: Grid) -> Callable[[Path], dict[str, torch.Tensor]]:
    return lambda folder: write_legacy(folder, model, grid)


def _megatron_dist(model: Model, grid: Grid, **options: object) -> Callable[[Path], dict[str, torch.Tensor]]:
    return lambda folder: write_torch_dist(folder, model, grid, **options)


# reader → builders of folders that need no process group; each returns what was written
BUILT: dict[str, tuple[tuple[str, Callable[[Path], dict[str, torch.Tensor]]], ...]] = {
    "hf": (
        ("shards", _hf(hf_builder.write_shards)),
        ("bin_shards", _hf(lambda folder: hf_builder.write_shards(folder, suffix=".bin"))),
        ("single", _hf(lambda folder: hf_builder.write_file(folder / "model.safetensors", hf_builder.WEIGHTS))),
        ("single_bin", _hf(lambda folder: hf_builder.write_file(folder / "pytorch_model.bin", hf_builder.WEIGHTS))),
    ),
    "zero": (
        ("zero1_frozen", _zero(1, 3)),
        ("zero1_bf16_optimizer", _zero(1, 2, layout="bf16")),
        ("zero2_gaps", _zero(2, 4, gap=3, dtype=torch.float16)),
        ("zero3_subgroups", _zero(3, 3, sub_numel=20)),
        ("zero3_one_rank", _zero(3, 1, dtype=torch.float32)),
    ),
    "universal": (
        ("universal_step_from_zero1", _universal(1)),
        ("universal_step_from_zero2", _universal(2)),
        ("universal_step_from_zero3", _universal(3)),
        ("universal_step_with_surplus", _universal(3, surplus=2)),
    ),
    "megatron": (
        ("megatron_tp2_pp2", _megatron(Model(qkv_bias=True), Grid(tp=2, pp=2))),
        ("megatron_tied_vpp2_fused_norms", _megatron(Model(tied=True, qk_norm=True), Grid(pp=2, vpp=2, fused_norms=True))),
        ("megatron_tp4_uneven", _megatron(Model(dtype=torch.bfloat16), Grid(tp=4, pp=3, stages=((1, 0, 3),)))),
        ("megatron_experts", _megatron(Model(experts=4), Grid(tp=2, ep=2))),
        ("megatron_sparse_grid", _megatron(Model(experts=4), Grid(tp=2, pp=2, ep=2, etp=1, experts_as="te_grouped"))),
        ("megatron_grouped", _megatron(Model(experts=4), Grid(tp=2, ep=2, experts_as="grouped", prefix="module."))),
    ),
    "megatron_dist": (
        ("dist_tp2_pp2", _megatron_dist(Model(qkv_bias=True), Grid(tp=2, pp=2))),
        ("dist_common_file", _megatron_dist(Model(tied=True, qk_norm=True), Grid(tp=4), common="file", optimizer="plain")),
        ("dist_no_axes", _megatron_dist(Model(dtype=torch.bfloat16), Grid(tp=2), axes=False, optimizer="plain")),
        ("dist_experts", _megatron_dist(Model(experts=4), Grid(tp=2, ep=2))),
        ("dist_layers_apart", _megatron_dist(Model(experts=4), Grid(tp=2, ep=2, etp=1), stacked=False)),
    ),
}
FILES = [
    (reader, layout)
    for reader in READERS
    for layout in LAYOUTS.get(reader.name, ()) + tuple(name for name, _ in BUILT.get(reader.name, ()))
]


def _checkpoint(reader: type[CheckpointReader], layout: str, written: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    build = dict(BUILT.get(reader.name, ())).get(layout)
    if build is None:
        return written / layout / "ckpt", load_file(written / layout / "truth.safetensors")
    (tmp_path / layout).mkdir()
    return tmp_path / layout, build(tmp_path / layout)


def test_every_reader_has_a_checkpoint_by_its_formats_own_writer():
    assert [reader.name for reader in READERS if reader.name not in LAYOUTS and reader.name not in BUILT] == []


@pytest.mark.parametrize(("kind", "layout"), FILES, ids=[f"{reader.name}-{layout}" for reader, layout in FILES])
class TestWrittenByItsFramework:
    def test_its_reader_is_chosen_and_every_byte_is_the_live_tensors(self, kind, layout, written, tmp_path):
        folder, truth = _checkpoint(kind, layout, written, tmp_path)
        reader = open_checkpoint(folder)
        assert isinstance(reader, kind)
        assert set(reader.catalog().tensors) == set(truth)
        for fqn, tensor in truth.items():
            assert same_bytes(assemble(reader, fqn, tuple(tensor.shape)), tensor), fqn

    def test_recorded_shapes_are_the_live_tensors(self, kind, layout, written, tmp_path):
        folder, truth = _checkpoint(kind, layout, written, tmp_path)
        shapes = {fqn: tensor.shape for fqn, tensor in open_checkpoint(folder).catalog().tensors.items()}
        assert shapes == {fqn: None if kind.name == "dcp_hf" else tuple(tensor.shape) for fqn, tensor in truth.items()}

    def test_replicas_hold_the_values_of_the_region_they_repeat(self, kind, layout, written, tmp_path):
        folder, truth = _checkpoint(kind, layout, written, tmp_path)
        reader = open_checkpoint(folder)
        for replica in reader.catalog().replicas:
            region = replica.region
            part = truth[replica.fqn][tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))]
            assert same_bytes(read_values(reader, replica), part), replica
            assert replica.index == -1

    def test_the_catalog_is_the_same_for_every_reader_of_the_folder(self, kind, layout, written, tmp_path):
        folder, _ = _checkpoint(kind, layout, written, tmp_path)
        one, other = open_checkpoint(folder).catalog(), open_checkpoint(folder).catalog()
        assert (one.digest, list(one.tensors), one.state) == (other.digest, list(other.tensors), other.state)
        assert one.format == kind.name
        assert Path(one.root).is_absolute()

    def test_a_fresh_reader_finds_payloads_without_a_catalog_of_its_own(self, kind, layout, written, tmp_path):
        folder, _ = _checkpoint(kind, layout, written, tmp_path)
        first = open_checkpoint(folder)
        catalog = first.catalog()
        fqn = next(iter(catalog.tensors))
        fragment = catalog.fragments(fqn)[0]
        assert kind(Source(Path(catalog.root))).payload(fragment) == first.payload(fragment)

    def test_the_digest_changes_with_a_files_time(self, kind, layout, written, tmp_path):
        folder, _ = _checkpoint(kind, layout, written, tmp_path)
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        before = open_checkpoint(copy).catalog()
        path = Path(before.root) / before.table.files[0]
        path.touch()
        assert open_checkpoint(copy).catalog().digest != before.digest


@pytest.mark.parametrize("kind", READERS, ids=[reader.name for reader in READERS])
def test_a_folder_of_something_else_is_answered_with_a_reason(kind, tmp_path):
    (tmp_path / "notes.txt").touch()
    probe = kind.probe(tmp_path)
    assert not probe.matches
    assert probe.because


def test_a_folder_no_format_recognises_is_refused_with_each_formats_reason(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FormatError) as refused:
        open_checkpoint(tmp_path)
    assert all(f"{kind.name}: " in str(refused.value) for kind in READERS)
    assert "notes.txt" in str(refused.value)
