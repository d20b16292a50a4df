"""Random DeepSpeed saves, written by hand: weights and moments come back bit for bit, from the engine and from the second path."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.formats.zero import ZeroReader
from tasks.witnesses.sources import decode_source
from tests.builders.zero import SLOTS, Tensors, Zero, write_zero
from tests.contract.assembled import assemble, gather, same_bytes

CLIENT = {"args": argparse.Namespace(lr=1.0), "np_rng_state": ("MT19937", np.arange(5)), "seen": {1, 2}, "loss": np.float64(2.5)}


@st.composite
def saves(draw):
    """Any model in any layout, of any world size, with padding larger than its parameters now and then."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def tensors(prefix: str, most: int) -> Tensors:
        shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=0, max_size=most))
        return {f"{prefix}.{n}.weight": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}

    masters = {"first.weight": torch.randn(draw(st.integers(1, 9)), 3, generator=generator), **tensors("layers", 5)}
    names = draw(st.permutations(sorted(masters)))  # round-robin saves order a group in any way
    cut = draw(st.integers(0, len(names) - 1))
    stage = draw(st.sampled_from([1, 2, 3]))
    layout = draw(st.sampled_from(["zero", "elastic", "bf16"])) if stage == 1 else "zero"
    old = draw(st.booleans())
    gap = 0 if old or stage == 3 else draw(st.sampled_from([0, 0, 1, 3]))
    tied = {"head.weight": draw(st.sampled_from(names))} if draw(st.booleans()) and not (old and stage == 3) else {}
    return Zero(
        masters,
        stage,
        draw(st.integers(1, 5)),
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        tuple(tuple(group) for group in (names[:cut], names[cut:]) if group),
        frozen={} if old and stage == 3 else tensors("frozen", 2),
        buffers={"scale": torch.randn(3, generator=generator), "count": torch.tensor(7)} if draw(st.booleans()) else {},
        aliases=tied,
        layout=layout,
        gap=gap,
        sub_numel=draw(st.sampled_from([1, 20, 10**9])),
        int_steps=draw(st.booleans()),
        maps=draw(st.booleans()),
        old=old,
        round_robin=draw(st.booleans()),
        client=CLIENT if draw(st.booleans()) else {},
    )


@given(saves())
def test_weights_and_moments_are_what_was_trained(zero):
    with tempfile.TemporaryDirectory() as folder:
        write_zero(Path(folder), zero)
        reader = open_checkpoint(Path(folder))
        catalog = reader.catalog()
        assert isinstance(reader, ZeroReader)
        assert (catalog.step, set(catalog.tensors)) == (4, set(zero.truth))
        for name, value in zero.truth.items():
            assert same_bytes(assemble(reader, name, tuple(value.shape)), value), name
        for name, master in zero.masters.items():
            for slot in SLOTS:
                assert same_bytes(assemble(reader, f"{slot}/{name}", tuple(master.shape)), zero.moment(slot, name)), (slot, name)
            if zero.int_steps:
                assert next(item.value for item in catalog.state if item.fqn == f"step/{name}") == 4
            else:
                assert assemble(reader, f"step/{name}", ()) == 4


@given(saves())
def test_the_second_path_derives_the_same_weights(zero):
    with tempfile.TemporaryDirectory() as folder:
        stored = decode_source("zero", (write_zero(Path(folder), zero),))
        assert set(stored) == set(zero.truth)
        for name, value in zero.truth.items():
            assert same_bytes(gather(stored, name, value), value), name
