"""Divergence of logits, against the textbook formula written out in numpy."""

import math

import numpy as np
import pytest
import torch

from reports.errors import ShapeError
from tasks.divergence import diverge


def _logits(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def _kl(reference: torch.Tensor, candidate: torch.Tensor) -> np.ndarray:
    p, q = (np.exp(x.double().numpy()) for x in (reference, candidate))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


def test_kl_is_summed_over_the_vocabulary_and_averaged_over_positions_in_nats():
    first, second = _logits(2, 5, 11, seed=1), _logits(2, 5, 11, seed=2)
    told = _kl(first, second)
    found = diverge([first], [second], vocab=11, noise=0.0)
    assert found.metrics["mean_kl"] == pytest.approx(told.mean())
    assert found.metrics["p95_kl"] == pytest.approx(np.quantile(told, 0.95))
    assert found.metrics["max_kl"] == pytest.approx(told.max())
    assert found.kl_by_position == pytest.approx(tuple(told.mean(0)))
    assert found.positions == 10


def test_kl_is_not_symmetric_and_the_reference_comes_first():
    sharp, flat = torch.tensor([[[5.0, 0.0, 0.0]]]), torch.tensor([[[0.0, 0.0, 0.0]]])
    one, other = (diverge([a], [b], vocab=3, noise=0.0).metrics["mean_kl"] for a, b in ((sharp, flat), (flat, sharp)))
    assert one == pytest.approx(float(_kl(sharp, flat).item()))
    assert other == pytest.approx(float(_kl(flat, sharp).item()))
    assert one != pytest.approx(other)


def test_equal_logits_do_not_diverge_at_all():
    logits = _logits(1, 4, 9, seed=3)
    metrics = diverge([logits], [logits.clone()], vocab=9, noise=0.0).metrics
    assert (metrics["mean_kl"], metrics["max_kl"], metrics["max_abs"], metrics["top1"]) == (0.0, 0.0, 0.0, 1.0)
    assert metrics["cosine"] == pytest.approx(1.0, abs=1e-12)


def test_a_constant_added_to_all_logits_is_no_kl_but_shows_in_max_abs():
    logits = _logits(1, 4, 9, seed=3).double()
    metrics = diverge([logits], [logits + 2], vocab=9, noise=0.0).metrics
    assert metrics["mean_kl"] == pytest.approx(0.0, abs=1e-14)
    assert metrics["max_abs"] == pytest.approx(2.0)


def test_padded_columns_are_left_out_of_both():
    logits = _logits(1, 3, 8, seed=4)
    padded = torch.cat([logits, torch.full((1, 3, 2), 99.0)], -1)
    assert diverge([logits], [padded], vocab=8, noise=0.0).metrics["max_abs"] == 0.0
    assert diverge([padded], [padded * 2], vocab=8, noise=0.0).metrics["max_abs"] < 90


def test_top1_counts_only_positions_whose_margin_exceeds_the_noise():
    reference = torch.tensor([[[1.0, 1.05, 0.0], [3.0, 0.0, 0.0], [3.0, 0.0, 0.0]]])
    candidate = torch.tensor([[[1.1, 1.0, 0.0], [0.0, 3.0, 0.0], [3.0, 0.0, 0.0]]])
    quiet = diverge([reference], [candidate], vocab=3, noise=0.1).metrics
    assert (quiet["top1"], quiet["top1_positions"]) == (0.5, 2.0)
    strict = diverge([reference], [candidate], vocab=3, noise=0.0).metrics
    assert (strict["top1"], strict["top1_positions"]) == (pytest.approx(1 / 3), 3.0)


def test_rows_of_different_length_share_their_positions():
    long, short = _logits(1, 4, 6, seed=5), _logits(2, 2, 6, seed=6)
    other_long, other_short = _logits(1, 4, 6, seed=7), _logits(2, 2, 6, seed=8)
    found = diverge([long, short], [other_long, other_short], vocab=6, noise=0.0)
    told = [_kl(long, other_long), _kl(short, other_short)]
    assert found.positions == 8
    assert found.kl_by_position[0] == pytest.approx(np.mean([told[0][0, 0], told[1][0, 0], told[1][1, 0]]))
    assert found.kl_by_position[3] == pytest.approx(told[0][0, 3])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_logit_stays_visible(value):
    broken = _logits(1, 3, 5, seed=9)
    broken[0, 1, 2] = value
    metrics = diverge([_logits(1, 3, 5, seed=9)], [broken], vocab=5, noise=0.0).metrics
    assert not math.isfinite(metrics["mean_kl"])
    assert not math.isfinite(metrics["max_abs"])


@pytest.mark.parametrize(("shape", "vocab"), [((1, 4, 6), 6), ((1, 3, 5), 6), ((1, 0, 6), 6)])
def test_shapes_that_do_not_fit_are_refused(shape, vocab):
    reference = torch.zeros(1, 3, 6) if shape[1] else torch.zeros(1, 0, 6)
    with pytest.raises(ShapeError):
        diverge([reference], [torch.zeros(shape)], vocab=vocab, noise=0.0)
