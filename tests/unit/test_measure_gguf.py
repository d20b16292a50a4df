"""What a GGUF file cannot be held against is said, and nothing of it crashes."""

import json
from pathlib import Path

import pytest

from tasks.measure_gguf import measure_ggufs
from tests.builders.gguf import build_model, write_release
from tests.builders.plans import whole, write_plan
from tests.builders.releases import header_shapes

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return build_model("wide", tmp_path_factory.mktemp("source") / "model")


def _plan(source: Path, path: Path) -> Path:
    shapes = header_shapes(source / "model.safetensors")
    return write_plan(path, "hf", source, [whole(name, shape, "F32") for name, shape in shapes.items()])


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"model_type": "mixtral"}, "model type mixtral is not judged"), ({"num_hidden_layers": None}, "num_hidden_layers is absent")],
)
def test_a_config_of_another_model_leaves_the_witness_unheard(fields, word, source, tmp_path):
    folder = write_release(source, tmp_path / "release", "Q8_0")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    found = measure_ggufs(folder, _plan(source, tmp_path / "plan.json"), (source,), 1)
    assert (found.witness.heard, len(found.tensors)) == (False, len(found.compared))
    assert word in found.witness.detail
    assert set(found.compared["compared"]) == {0}


def test_a_head_that_does_not_divide_the_rows_is_not_compared(source, tmp_path):
    folder = write_release(source, tmp_path / "release", "F16")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "head_dim": 48}))
    found = measure_ggufs(folder, _plan(source, tmp_path / "plan.json"), (source,), 2).compared
    left = set(found["name"][found["compared"] == 0])
    assert left == {f"blk.{layer}.attn_{part}.weight" for layer in range(2) for part in "qk"}


def test_of_several_files_none_is_compared(source, tmp_path):
    folder = write_release(source, tmp_path / "release", "F16")
    (folder / "model-F16.gguf").replace(folder / "a.gguf")
    other = write_release(source, tmp_path / "other", "Q8_0")
    (other / "model-Q8_0.gguf").replace(folder / "b.gguf")
    found = measure_ggufs(folder, _plan(source, tmp_path / "plan.json"), (source,), 1)
    assert (found.witness.heard, found.witness.detail) == (False, "several GGUF files: judge them one by one")
