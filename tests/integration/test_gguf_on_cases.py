"""GGUF files of every recorded checkpoint whose family has an architecture: bit-equal to the gguf package's own, recorded logits held."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flows.export import run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from tests.builders.gguf import ARCHITECTURES, content_of
from tests.builders.released import write_release

gguf = pytest.importorskip("gguf")
pytestmark = [pytest.mark.cases, pytest.mark.slow]


def _is_fit(case: Path) -> bool:
    files = [case / name for name in ("case.json", "hf/config.json", "ref/expected.safetensors")]
    if not all(path.is_file() for path in files):
        return False
    expect, model = json.loads(files[0].read_text())["expect"], json.loads(files[1].read_text())["model_type"]
    return expect == "export" and model in ARCHITECTURES


def _cases() -> list[object]:
    root = os.environ.get("SHARDWRIGHT_CASES")
    found = sorted(path for path in Path(root).iterdir() if _is_fit(path)) if root else []
    return [pytest.param(path, id=path.name) for path in found] or [pytest.param(None, marks=pytest.mark.skip(reason="cases: not run"))]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("case", _cases())
def test_recorded_checkpoint_becomes_the_packages_own_file(case, kind, tmp_path):
    golden = case / "ref/golden.safetensors"
    request = {"source": case / "ckpt", "to": tmp_path / "release", "gguf": kind, "assets": case / "hf", "runs": tmp_path / "runs"}
    dropped = ["fixture_*=buffers that the recorded runs added"] if case.name.startswith("ds_") else []
    request |= {"fsync": False, "drop": dropped, "golden": golden if golden.is_file() else None}
    outcome = run_export(ExportRequest.model_validate(request), PlainRunner(), Silent())
    assert outcome.verdict.green
    config = json.loads((case / "hf/config.json").read_text())
    truth = {name: t for name, t in load_file(case / "ref/expected.safetensors").items() if not name.startswith("fixture_")}
    if config["tie_word_embeddings"]:
        truth.pop("lm_head.weight", None)
    wanted = content_of(write_release(tmp_path / "truth", truth, assets=case / "hf"), kind.upper())
    (path,) = (tmp_path / "release").glob("*.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert found.keys() == wanted.tensors.keys()
    for name, (values, stored) in wanted.tensors.items():
        assert (found[name].tensor_type, found[name].data.tobytes()) == (stored, gguf.quants.quantize(values, stored).tobytes()), name
