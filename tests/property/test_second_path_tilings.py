"""However a tensor is cut into shards, and however small the pieces, the second path gives each value once, in its place."""

import json
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tasks.witnesses.second_path import SecondPath
from tests.builders.plans import Made, Take, write_plan


def _cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    return list(pairwise(edges))


@st.composite
def cut_tensors(draw: st.DrawFn):
    """Heads, head dim, columns, and per shard a rectangle; every column strip has row cuts of its own."""
    heads, half, cols = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = heads * half * 2
    boxes = [(r, c) for c in _cuts(draw, cols) for r in _cuts(draw, rows)]
    return heads, half * 2, cols, boxes, draw(st.integers(1, 40)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(cut_tensors())
def test_every_tiling_gives_the_tensor(tmp_path_factory, cut):
    heads, head_dim, cols, boxes, max_numel, is_rope = cut
    weight = torch.arange(heads * head_dim * cols, dtype=torch.float32).reshape(-1, cols)
    root = Path(tmp_path_factory.mktemp("source"))
    for rank, ((top, bottom), (left, right)) in enumerate(boxes, start=1):
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [top, left]}})}
        file = root / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file({"w": weight[top:bottom, left:right].contiguous()}, file, metadata=metadata)
    shape = (heads * head_dim, cols)
    target = Made("w", shape, "F32", (Take("w", shape),), "rope_to_halves" if is_rope else "same", head_dim)
    witness = SecondPath(write_plan(root / "plan.json", "dcp_hf", root, [target]), (root,))
    found = torch.full(shape, -1.0)
    for piece in witness.pieces("w", max_numel):
        cut_out = tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.shape, strict=True))
        assert piece.values.numel() <= max_numel
        assert bool((found[cut_out] == -1).all())
        found[cut_out] = piece.values
    halves = weight.view(heads, head_dim // 2, 2, cols).transpose(1, 2).reshape(shape)
    assert torch.equal(found, halves if is_rope else weight)
