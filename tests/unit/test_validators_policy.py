"""Which limits apply to a comparison of logits."""

import pytest

from reports.errors import RequestError
from validators.policy import LIMITS, LOWER, TOP1_POSITIONS, UPPER, cast_limits, limits_row


@pytest.mark.parametrize(
    ("release", "source", "computed_in", "is_moe", "row"),
    [
        ("F32", "F32", "float32", False, "F32"),
        ("F32", "BF16", "float32", False, "BF16"),
        ("F16", "F32", "torch.float32", False, "F16"),
        ("F16", "BF16", "", False, "BF16"),
        ("F32", "F32", "bfloat16", True, "BF16 MoE"),
        ("F64", "F32", "", True, "F32 MoE"),
        ("F16", "", "", True, "F16 MoE"),
    ],
)
def test_coarsest_dtype_names_the_row(release, source, computed_in, is_moe, row):
    assert limits_row(release, source, computed_in, is_moe=is_moe) == row


@pytest.mark.parametrize("dtypes", [("I8", "F32", ""), ("", "", "")])
def test_dtype_without_limits_is_refused(dtypes):
    with pytest.raises(RequestError, match="no limits"):
        limits_row(*dtypes, is_moe=False)


def test_every_row_limits_every_metric_and_bf16_is_widest():
    for row, limits in LIMITS.items():
        assert set(limits) == UPPER | LOWER, row
    for kind in ("", " MoE"):
        order = [LIMITS[f"{code}{kind}"] for code in ("F32", "F16", "BF16")]
        assert [limits["mean_kl"] for limits in order] == sorted(limits["mean_kl"] for limits in order)
        assert [limits["cosine"] for limits in order] == sorted((limits["cosine"] for limits in order), reverse=True)


@pytest.mark.parametrize(("floor", "limit"), [(0.0, 1e-8), (1e-5, 3e-5), (1.0, 1e-3)])
def test_cast_is_held_near_the_noise_floor_and_never_above_the_row(floor, limit):
    limits = cast_limits("BF16", floor)
    assert limits["mean_kl"] == pytest.approx(limit)
    assert limits["p95_kl"] == LIMITS["BF16"]["p95_kl"]


def test_top1_positions_is_the_published_number():
    assert TOP1_POSITIONS == 200
