"""Quantized parts written from checkpoints cut at random: the same bytes as compressed-tensors makes of the whole weights."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tasks.engine.families.llama import LLAMA
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.planning.quantize import QuantizeRule
from tasks.engine.writing import execute
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.shardings import FakeReader
from tests.unit.test_encodings import DTYPES, hard_weight, library_parts, same_bits
from validators.expectation import Expectation

pytest.importorskip("compressed_tensors")
# Shapes whose parts fill whole units of alignment, and some that do not, so that scales come before values.
SHAPES = {"fp8": (5, 12), "int8": (8, 12), "int8-w8a8": (3, 7), "fp8-block": (256, 128), "int4": (9, 256)}


def _source(base: Path, shapes: dict[str, tuple[int, ...]], dtype: str, seed: int) -> tuple[FakeReader, dict[str, torch.Tensor]]:
    tensors = {
        name: hard_weight(shape if len(shape) == 2 else (1, *shape), DTYPES[dtype], seed + at).view(shape)
        for at, (name, shape) in enumerate(shapes.items())
    }
    raw = {name: t.view(torch.int32 if dtype == "F32" else torch.int16).numpy().view(f"u{t.element_size()}") for name, t in tensors.items()}
    return FakeReader.write(base / "source", raw, dict.fromkeys(raw, dtype), seed), tensors


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("encoding", sorted(SHAPES))
def test_a_weight_cut_at_random_is_quantized_as_if_it_were_whole(encoding, dtype, tmp_path, monkeypatch):
    rows, columns = SHAPES[encoding]
    for seed in range(6):
        rng = random.Random(f"{encoding} {dtype} {seed}")
        monkeypatch.setattr(execute, "BAND_NBYTES", rng.choice([1, 200, 5000, 1 << 20]))
        shapes = {f"model.layers.{i}.mlp.up_proj.weight": (rows * rng.choice([1, 2]), columns) for i in range(3)}
        shapes |= {"model.layers.0.input_layernorm.weight": (7,), "lm_head.weight": (5, columns)}
        base = tmp_path / str(seed)
        reader, tensors = _source(base, shapes, dtype, seed)
        expected = Expectation("llama", shapes, is_tied=False)
        request = PlanRequest(LLAMA, None, expected, quantize=(QuantizeRule("*", encoding),), max_file_bytes=rng.choice([3000, 10**9]))
        plan = make_plan(reader.catalog(), request)
        source = SourceBytes(reader, reader.catalog())
        wanted = {}
        for name, tensor in tensors.items():
            if name.endswith("up_proj.weight"):
                wanted |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in library_parts(tensor, encoding).items()}
            else:
                wanted[name] = tensor
        found = {}
        for file in plan.files:
            record = execute.execute_file(file, source, base / file.name)
            assert record.nbytes == (base / file.name).stat().st_size
            with safe_open(base / file.name, "pt") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        source.files.close()
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
        for file in plan.files:
            parts = [tensor.part.weight for tensor in file.tensors if tensor.part is not None]
            assert all(parts.count(weight) == len(wanted_of(wanted, weight)) for weight in parts)


def wanted_of(wanted: dict[str, torch.Tensor], weight: str) -> list[str]:
    """The parts of a weight."""
    return [name for name in wanted if name.startswith(weight.removesuffix("weight"))]


def test_a_cast_before_the_quantization_is_that_of_torch(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    reader, tensors = _source(tmp_path, {name: (16, 40)}, "F32", 3)
    expected = Expectation("llama", {name: (16, 40)}, is_tied=False)
    plan = make_plan(reader.catalog(), PlanRequest(LLAMA, None, expected, dtype="BF16", quantize=(QuantizeRule("*", "int8"),)))
    source = SourceBytes(reader, reader.catalog())
    execute.execute_file(plan.files[0], source, tmp_path / "out.safetensors")
    source.files.close()
    wanted = library_parts(tensors[name].to(torch.bfloat16), "int8")
    with safe_open(tmp_path / "out.safetensors", "pt") as stored:
        assert all(same_bits(stored.get_tensor(f"{name.removesuffix('weight')}{suffix}"), part) for suffix, part in wanted.items())
