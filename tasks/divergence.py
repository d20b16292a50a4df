"""How far two sets of logits are apart.

KL is in nats: float64 log-softmax of both, reference against candidate, summed over the vocabulary, averaged over positions. Columns from
`vocab` on are padding and left out of both. Top-1 looks only at positions whose reference margin (first minus second logit) exceeds the
measured noise: at a tie the likeliest token is a matter of rounding.

Shapes: B rows, S positions, V columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from reports.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Divergence:
    """Metrics over all positions of all batches; `kl_by_position` is the mean KL per sequence position, over the rows that reach it.

    `metrics` has mean_kl, p95_kl, max_kl, cosine (mean over positions), max_abs, top1 (1 when no position counts) and top1_positions.
    """

    positions: int
    metrics: dict[str, float]
    kl_by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    # One row of a batch: (S,) each.
    kl: torch.Tensor
    cosine: torch.Tensor
    gap: float
    agrees: torch.Tensor
    counts: torch.Tensor


def diverge(reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor], *, vocab: int, noise: float) -> Divergence:
    """Compare logits batch by batch.

    Args:
        reference: (B, S, V) each, any float dtype.
        candidate: the same batches.
        vocab: how many columns are ids; both have at least as many.
        noise: largest difference of one logit that means nothing.

    Returns:
        The metrics; NaN where logits are not finite.

    Raises:
        ShapeError: batches differ in shape, have too few columns, or there is no position at all.
    """
    if sum(first.shape[0] * first.shape[1] for first in reference) == 0:
        raise ShapeError("no position to compare", where="logits")
    rows: list[_Row] = []
    for first, second in zip(reference, candidate, strict=True):
        if first.shape[:2] != second.shape[:2] or min(first.shape[2], second.shape[2]) < vocab:
            raise ShapeError(f"logits {tuple(first.shape)} against {tuple(second.shape)}, {vocab} columns wanted", where="logits")
        rows += [_compare_row(a[:, :vocab].double(), b[:, :vocab].double(), noise) for a, b in zip(first, second, strict=True)]
    kl = torch.cat([row.kl for row in rows])
    counts = torch.cat([row.counts for row in rows])
    agrees = torch.cat([row.agrees for row in rows])[counts]
    metrics = {
        "mean_kl": float(kl.mean()),
        "p95_kl": float(kl.quantile(0.95)),
        "max_kl": float(kl.max()),
        "cosine": float(torch.cat([row.cosine for row in rows]).mean()),
        "max_abs": float(torch.tensor([row.gap for row in rows]).max()),
        "top1": float(agrees.double().mean()) if len(agrees) else 1.0,
        "top1_positions": float(len(agrees)),
    }
    return Divergence(len(kl), metrics, _by_position([row.kl for row in rows]))


def _compare_row(reference: torch.Tensor, candidate: torch.Tensor, noise: float) -> _Row:
    log_p, log_q = functional.log_softmax(reference, -1), functional.log_softmax(candidate, -1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)  # below zero only by rounding; NaN stays
    top = reference.topk(min(2, reference.shape[-1]), -1).values
    margin = top[:, 0] - top[:, -1] if top.shape[-1] > 1 else torch.full_like(top[:, 0], torch.inf)
    cosine = functional.cosine_similarity(reference, candidate, -1)
    agrees = reference.argmax(-1) == candidate.argmax(-1)
    return _Row(kl, cosine, float((reference - candidate).abs().max()), agrees, margin > noise)


def _by_position(kls: list[torch.Tensor]) -> tuple[float, ...]:
    longest = max(len(kl) for kl in kls)
    total, count = torch.zeros(longest, dtype=torch.float64), torch.zeros(longest, dtype=torch.float64)
    for kl in kls:
        total[: len(kl)] += kl
        count[: len(kl)] += 1
    return tuple((total / count).tolist())
