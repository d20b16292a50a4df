"""Random checkpoints, cut and scattered at random, planned and written: every released byte is what numpy and torch make of the values."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from reports.errors import FormatError
from tasks.engine.families.llama import LLAMA
from tasks.engine.families.moe import MIXTRAL
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.writing import execute, pipeline
from tasks.engine.writing.execute import FileRecord, execute_file, verify_shared
from tasks.engine.writing.source_bytes import SourceBytes
from tests.builders.shardings import FakeReader

WIDTHS = {"BOOL": 1, "U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "F64": 8, "I64": 8}
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True)
def _small_bands():
    # Bands and buffers of a few bytes, so that tiny tensors take many.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "BAND_NBYTES", 40)
        patch.setattr(pipeline, "CHUNK_NBYTES", 24)
        patch.setattr(pipeline, "WRITE_NBYTES", 10)
        yield


def _raw(shape: tuple[int, ...], width: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (*shape, width), dtype=np.uint8).view(f"u{width}").reshape(shape)


def _write(reader: FakeReader, request: PlanRequest, to: Path, workers: int = 1) -> dict[str, bytes]:
    plan = make_plan(reader.catalog(), request)
    source = SourceBytes(reader, reader.catalog())
    to.mkdir()

    def write(file) -> FileRecord:
        return execute_file(file, source, to / file.name, with_helper=workers == 1)

    with ThreadPoolExecutor(workers) as pool:
        records = tuple(pool.map(write, plan.files))
    verify_shared(plan.files, records, source)
    source.files.close()
    assert [(r.name, r.nbytes) for r in records] == [(f.name, (to / f.name).stat().st_size) for f in plan.files]
    return {path.name: path.read_bytes() for path in sorted(to.iterdir())}


def _released(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.iterdir()):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def models(draw):
    """Raw tensors of any shape and dtype under their own names."""
    rng, tensors, dtypes = np.random.default_rng(draw(SEEDS)), {}, {}
    for n in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        tensors[f"layers.{n}.w"], dtypes[f"layers.{n}.w"] = _raw(shape, WIDTHS[dtype], rng), dtype
    return tensors, dtypes


@given(models(), SEEDS, st.booleans(), st.sampled_from([1, 50, 400, 10**9]))
def test_whatever_the_cut_the_released_bytes_are_the_tensors(model, seed, crcs, max_file_bytes):
    tensors, dtypes = model
    with tempfile.TemporaryDirectory() as folder:
        reader = FakeReader.write(Path(folder, "ckpt"), tensors, dtypes, seed, crcs=crcs)
        _write(reader, PlanRequest(max_file_bytes=max_file_bytes), Path(folder, "out"))
        found = _released(Path(folder, "out"))
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        assert tuple(found[name].shape) == values.shape
        assert _bytes(found[name]) == values.tobytes(), name


@given(models(), SEEDS, SEEDS)
def test_the_bytes_depend_neither_on_the_cut_nor_on_the_number_of_workers(model, seed, other):
    tensors, dtypes = model
    request = PlanRequest(max_file_bytes=100)
    with tempfile.TemporaryDirectory() as folder:
        one = FakeReader.write(Path(folder, "a"), tensors, dtypes, seed)
        two = FakeReader.write(Path(folder, "b"), tensors, dtypes, other)
        assert _write(one, request, Path(folder, "one")) == _write(two, request, Path(folder, "four"), workers=4)


@given(models(), SEEDS, st.sampled_from(["F32", "BF16"]))
def test_a_cast_is_torchs_own_and_leaves_integers_alone(model, seed, dtype):
    tensors, dtypes = model
    for name in tensors:  # values that no cast overflows, in half of the tensors' dtypes
        if dtypes[name] in FLOATS:
            noise = torch.from_numpy(np.asarray(tensors[name].astype(np.int64) % 2001 - 1000)).to(FLOATS[dtypes[name]]) / 64
            tensors[name] = noise.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[noise.element_size()]).numpy()
            tensors[name] = tensors[name].view(f"u{tensors[name].itemsize}")
        elif dtypes[name] == "F8_E4M3":
            dtypes[name] = "U8"
    with tempfile.TemporaryDirectory() as folder:
        reader = FakeReader.write(Path(folder, "ckpt"), tensors, dtypes, seed)
        _write(reader, PlanRequest(dtype=dtype, max_file_bytes=300), Path(folder, "out"))
        found = _released(Path(folder, "out"))
    for name, values in tensors.items():
        want = values.tobytes()
        if dtypes[name] in FLOATS:
            source = torch.from_numpy(values.copy().view(SIGNED[values.itemsize])).view(FLOATS[dtypes[name]])
            want = _bytes(source.to(FLOATS[dtype]))
        assert _bytes(found[name]) == want, name


def _titan(rng: np.random.Generator, *, is_fused: bool) -> tuple[dict, np.ndarray, dict]:
    # torchtitan's names and layout; the truth by torch's views, transformers' own permutation for q and k
    config = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
    config |= {"intermediate_size": 10, "num_hidden_layers": 1, "vocab_size": 7}
    titan = {"tok_embeddings": (7, 24), "norm": (24,), "layers.0.attention_norm": (24,), "layers.0.ffn_norm": (24,)}
    titan |= {"layers.0.attention.wo": (24, 24), "layers.0.feed_forward.w1": (10, 24), "layers.0.feed_forward.w2": (24, 10)}
    titan |= {"layers.0.feed_forward.w3": (10, 24), "lm_head": (7, 24)}
    source = {f"{name}.weight": _raw(shape, 4, rng) for name, shape in titan.items()}
    q, k, v = _raw((24, 24), 4, rng), _raw((8, 24), 4, rng), _raw((8, 24), 4, rng)
    attention = "layers.0.attention.qkv_linear"
    if is_fused:  # [n_kv, R + 2, head_dim, dim]
        parts = [q.reshape(2, 3, 4, 24), k.reshape(2, 1, 4, 24), v.reshape(2, 1, 4, 24)]
        source[f"{attention}.wqkv.weight"] = np.concatenate(parts, axis=1).reshape(-1, 24)
    else:
        source |= {f"{attention}.w{name}.weight": part for name, part in (("q", q), ("k", k), ("v", v))}
    layer = "model.layers.0"
    renamed = {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "lm_head",
        f"{layer}.input_layernorm": "layers.0.attention_norm",
        f"{layer}.post_attention_layernorm": "layers.0.ffn_norm",
        f"{layer}.self_attn.o_proj": "layers.0.attention.wo",
        f"{layer}.mlp.gate_proj": "layers.0.feed_forward.w1",
        f"{layer}.mlp.down_proj": "layers.0.feed_forward.w2",
        f"{layer}.mlp.up_proj": "layers.0.feed_forward.w3",
    }
    truth = {f"{ours}.weight": source[f"{theirs}.weight"] for ours, theirs in renamed.items()}
    truth |= {f"{layer}.self_attn.{n}_proj.weight": _permuted(w, 4) for n, w in (("q", q), ("k", k))}
    truth[f"{layer}.self_attn.v_proj.weight"] = v
    return config, source, truth


def _permuted(rows: np.ndarray, head_dim: int) -> np.ndarray:
    view = torch.from_numpy(rows.view(np.int32)).view(rows.shape[0] // head_dim, head_dim // 2, 2, rows.shape[1])
    return view.transpose(1, 2).reshape(rows.shape).numpy()


def _mixtral(rng: np.random.Generator) -> tuple[dict, dict, dict]:
    # transformers 5's live names, experts stacked
    config = {"model_type": "mixtral", "hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2}
    config |= {"intermediate_size": 5, "num_hidden_layers": 1, "vocab_size": 7, "num_local_experts": 3}
    layer = "model.layers.0"
    shapes = {"model.embed_tokens.weight": (7, 6), "model.norm.weight": (6,), "lm_head.weight": (7, 6)}
    shapes |= {f"{layer}.input_layernorm.weight": (6,), f"{layer}.post_attention_layernorm.weight": (6,)}
    shapes |= {f"{layer}.self_attn.{n}_proj.weight": (rows, 6) for n, rows in (("q", 6), ("k", 2), ("v", 2))}
    shapes[f"{layer}.self_attn.o_proj.weight"] = (6, 6)
    source = {name: _raw(shape, 4, rng) for name, shape in shapes.items()}
    truth = dict(source)
    fused, down = _raw((3, 10, 6), 4, rng), _raw((3, 6, 5), 4, rng)
    source |= {f"{layer}.mlp.experts.gate_up_proj": fused, f"{layer}.mlp.experts.down_proj": down}
    source[f"{layer}.mlp.gate.weight"] = truth[f"{layer}.block_sparse_moe.gate.weight"] = _raw((3, 6), 4, rng)
    for expert in range(3):
        gate, up = np.split(fused[expert], 2)
        for name, values in (("w1", gate), ("w3", up), ("w2", down[expert])):
            truth[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = values
    return config, source, truth


MAPPED = {
    "llama-torchtitan": (LLAMA, lambda rng: _titan(rng, is_fused=False)),
    "llama-torchtitan-fused-qkv": (LLAMA, lambda rng: _titan(rng, is_fused=True)),
    "mixtral-stacked-experts": (MIXTRAL, _mixtral),
}


@pytest.mark.parametrize("kind", MAPPED)
@given(SEEDS, st.booleans(), st.sampled_from([1, 700, 10**9]))
def test_a_mapped_model_is_what_torchs_views_make_of_it(kind, seed, shapes, max_file_bytes):
    family, make = MAPPED[kind]
    config, source, truth = make(np.random.default_rng(seed))
    dims = family.dims(config)
    request = PlanRequest(family, dims, family.expectation(dims), max_file_bytes=max_file_bytes)
    with tempfile.TemporaryDirectory() as folder:
        reader = FakeReader.write(Path(folder, "ckpt"), source, dict.fromkeys(source, "F32"), seed, shapes=shapes)
        one = _write(reader, request, Path(folder, "one"))
        assert one == _write(reader, request, Path(folder, "four"), workers=4)
        found = _released(Path(folder, "one"))
    assert found.keys() == truth.keys()
    for name, values in truth.items():
        assert _bytes(found[name]) == values.tobytes(), name


@given(SEEDS, st.integers(0, 10**9))
def test_one_flipped_bit_anywhere_in_the_values_is_refused(seed, bit):
    config, source, _ = _mixtral(np.random.default_rng(seed))
    dims = MIXTRAL.dims(config)
    request = PlanRequest(MIXTRAL, dims, MIXTRAL.expectation(dims), max_file_bytes=300)
    with tempfile.TemporaryDirectory() as folder:
        reader = FakeReader.write(Path(folder, "ckpt"), source, dict.fromkeys(source, "F32"), seed)
        table = reader.catalog().table
        row = bit % len(table.file)
        if table.nbytes[row] == 0:
            return
        path = Path(folder, "ckpt", table.files[int(table.file[row])])
        content = bytearray(path.read_bytes())
        content[int(table.start[row]) + bit // 8 % int(table.nbytes[row])] ^= 1 << bit % 8
        path.write_bytes(content)
        with pytest.raises(FormatError, match="CRC32") as refusal:
            _write(reader, request, Path(folder, "out"))
        assert str(path) in str(refusal.value)
