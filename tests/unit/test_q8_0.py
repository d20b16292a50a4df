"""Q8_0's bytes equal those of the gguf package, whatever the values; what it cannot hold is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from reports.errors import EncodingError
from tasks.engine.encodings.q8_0 import BLOCK, BLOCK_NBYTES, encode_q8_0

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the package divides by scales that are nearly zero
JUST_BELOW_HALF = 0.5 - 2.0**-25


def _own(values: torch.Tensor) -> np.ndarray:
    return gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)


def _ties(value: float) -> torch.Tensor:
    rows = torch.full((2, 2 * BLOCK), value)
    rows[:, ::BLOCK] = 127.0  # so that a step is one
    return rows * torch.tensor([[1.0], [-1.0]])


@pytest.mark.parametrize("value", [0.5, 1.5, 2.5, 126.5, JUST_BELOW_HALF, 0.0, -0.0])
def test_halves_are_rounded_away_from_zero_and_what_is_just_below_is_not(value):
    assert np.array_equal(encode_q8_0("w", _ties(value)).numpy(), _own(_ties(value)))


@given(arrays.arrays(np.float32, (3, 2 * BLOCK), elements=st.floats(-1e6, 1e6, width=32)))
def test_any_values_give_the_packages_bytes(values):
    assert np.array_equal(encode_q8_0("w", torch.from_numpy(values)).numpy(), _own(torch.from_numpy(values)))


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-3, 1.0, 1e4])
def test_values_of_any_size_give_the_packages_bytes(scale):
    values = torch.randn(64, 5 * BLOCK, generator=torch.Generator().manual_seed(3)) * scale
    found = encode_q8_0("w", values)
    assert found.shape == (64, 5 * BLOCK_NBYTES)
    assert np.array_equal(found.numpy(), _own(values))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_no_scale_can_hold_is_refused_by_name(value):
    values = torch.zeros(2, BLOCK)
    values[1, 3] = value
    with pytest.raises(EncodingError, match=r"^model\.w: .*NaN or infinite, or too large"):
        encode_q8_0("model.w", values)
