"""The release policy: what the numbers of a check may be, which checks must not be skipped, and what is waived. One tolerance table.

A `Policy` is what an owner may decide; `validators.policy_file` reads one, `validators.review` holds a report against it.

A *row* of limits is named by the coarsest dtype that took part: the release's, the source's, and the one the reference forward was
computed in; or, of a quantized release, by the coarsest encoding of its weights. Mixture-of-experts models have rows of their own: a
router flips experts at rounding noise.

Keys of a row are keys of `LogitsComparison.metrics`. KL is in nats, summed over the vocabulary; `mean_kl` and `p95_kl` are over positions.
`mean_kl`, `p95_kl` bound from above, `cosine` and `top1` from below. Max KL and max abs are reported, never limited.

Sources: NeMo Automodel checkpoint robustness profiles (README, tests/functional_tests); llama.cpp `perplexity --kl-divergence` tables for
Llama-3-8B; own measurements on trained toy models, dense and MoE.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from reports.errors import RequestError, name_some
from reports.model import Waiver

LimitsRow = Literal["F32", "F16", "BF16", "FP8", "INT8", "INT4", "F32 MoE", "F16 MoE", "BF16 MoE", "FP8 MoE", "INT8 MoE", "INT4 MoE"]

UPPER = frozenset({"mean_kl", "p95_kl"})  # metrics a limit bounds from above
LOWER = frozenset({"cosine", "top1"})  # metrics a limit bounds from below

LIMITS: Mapping[LimitsRow, Mapping[str, float]] = MappingProxyType(
    {
        "F32": {"mean_kl": 1e-7, "p95_kl": 1e-6, "cosine": 0.999999, "top1": 0.999},  # Automodel strict, same implementation
        "F16": {"mean_kl": 1e-4, "p95_kl": 1e-3, "cosine": 0.9999, "top1": 0.995},  # llama.cpp: bf16 to fp16 2.5e-5, 99.74 %
        "BF16": {"mean_kl": 1e-3, "p95_kl": 1e-2, "cosine": 0.999, "top1": 0.98},  # honest casts of toys 2e-7 to 4e-4
        "F32 MoE": {"mean_kl": 1e-4, "p95_kl": 1e-3, "cosine": 0.9999, "top1": 0.999},  # Automodel strict, cross-framework: rare flips
        "F16 MoE": {"mean_kl": 2.5e-2, "p95_kl": 1e-1, "cosine": 0.99, "top1": 0.95},  # as BF16 MoE: a flip costs the same
        "BF16 MoE": {"mean_kl": 2.5e-2, "p95_kl": 1e-1, "cosine": 0.99, "top1": 0.95},  # honest cast of a toy 2.6e-3; Automodel relaxed
        "FP8": {"mean_kl": 1e-2, "p95_kl": 5e-2, "cosine": 0.99, "top1": 0.95},  # between llama.cpp's Q8_0 1.4e-3 and Q6_K 5.4e-3, twofold
        "INT8": {"mean_kl": 5e-3, "p95_kl": 3e-2, "cosine": 0.995, "top1": 0.97},  # llama.cpp Q8_0 1.4e-3
        "INT4": {"mean_kl": 5e-2, "p95_kl": 2.5e-1, "cosine": 0.95, "top1": 0.9},  # llama.cpp Q4_K_M 3.1e-2
        "FP8 MoE": {"mean_kl": 2.5e-2, "p95_kl": 1e-1, "cosine": 0.99, "top1": 0.95},  # no finer than BF16 MoE: a flip costs the same
        "INT8 MoE": {"mean_kl": 2.5e-2, "p95_kl": 1e-1, "cosine": 0.99, "top1": 0.95},
        "INT4 MoE": {"mean_kl": 1e-1, "p95_kl": 5e-1, "cosine": 0.93, "top1": 0.85},  # INT4 twofold, for the flips
    }
)
# The row of an encoding's kind and bits: of a dense model, and of one that routes. The later one counts where there are several.
_ENCODING_ROWS: Mapping[tuple[str, int], tuple[LimitsRow, LimitsRow]] = MappingProxyType(
    {("int", 8): ("INT8", "INT8 MoE"), ("float", 8): ("FP8", "FP8 MoE"), ("int", 4): ("INT4", "INT4 MoE")}
)

# Coarser means more rounding. Every spelling that configs, safetensors and torch use.
_COARSENESS: Mapping[str, int] = MappingProxyType({"F64": 0, "F32": 1, "F16": 2, "BF16": 3})
UNQUANTIZED = frozenset(_COARSENESS)  # dtypes whose values mean something by themselves, and that a config names
_CODES: Mapping[str, str] = MappingProxyType(
    {"float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16", "bfloat16": "BF16"}
)

FLOOR_FACTOR = 3.0  # a cast's mean KL may be this many times the noise floor measured in the same run
SMALLEST_MEAN_KL = 1e-8  # below this a mean KL is rounding of the comparison itself
TOP1_POSITIONS = 200  # top-1 gates only from this many positions whose margin exceeds the noise
FLUSHED_SHARE = 1e-4  # share of non-zero values that a cast to fp16 may turn into zero
LARGEST_EPS = 1e-3  # a norm's epsilon above this changes what the norm computes
NEAR_DISTANCE = 0.02  # relative distance of two layers' samples; independent weights are 1.4 apart, training moves them further than this
ROUNDING_DISTANCE = 0.005  # what a copy through another dtype explains: bf16 rounds by up to 0.004
ALIKE_DISTANCE = 0.2  # a role whose tensors are all nearer than this is shared by design
REPEATED_BLOCK_ROWS = 8  # so many rows that repeat others in their order are a shard read twice, not tokens made alike
ZERO_CENTRED_LEAN = 0.75  # share of a norm's values above zero; trained gammas have nearly all, those less one a half or fewer
STRAIGHT_LEAN = 0.95  # share from which a norm's values are above zero but for strays
OUTLIER_SPREADS = 8.0  # robust standard deviations of log rms; with the factors below, since a few siblings are often very alike
OUTLIER_FACTORS: Mapping[str, float] = MappingProxyType(  # rms against the median, and against both neighbours over layers
    {"layers": 2.0, "experts": 3.0, "edge": 5.0}  # first and last layers honestly differ by 2 to 3
)
FEW_ZEROS = 0.01  # share of exact zeros of a role that was not pruned; training leaves none, a cast to fp16 a few
LOST_ZEROS = 0.05  # share of zeros above that of the role: a part of a matrix was never filled
LARGEST_LOST_SHARE = 0.25  # of a role that lost a part; more may be layers that were pruned on purpose
LOST_EXPERT_ZEROS = 0.25  # the same of a fused expert's 32 sampled values, of which chance makes one or two zero
DRIFT_FACTOR = 4.0  # rms of a matrix against that of an earlier release; training moves it by percents, a lost scale by far more
UNSET_LENGTH = 10**9  # transformers writes 1e30 for "no limit"

# Relative rms of a dequantized weight against its source, by kind and bits: what one scale per channel, block or group of 128 leaves.
# Other bits have only the bound that follows from their scales. Sound values: e4m3 0.026, int8 0.009, int4 0.09 to 0.11.
ENCODING_ERRORS: Mapping[tuple[str, int], float] = MappingProxyType({("float", 8): 0.04, ("int", 8): 0.015, ("int", 4): 0.12})
ROUNDING_SLACK = 1.2  # an integer encoding may be so many times coarser than rounding to its own scales
LARGEST_WEIGHT = 1000.0  # of a linear layer that was quantized; sound ones stay below 100, inverted scales of 8 bits allow thousands
CALIBRATED_SLACK = 1.5  # below 8 bits, calibrated methods (GPTQ) trade the error of single weights for that of the layer's output

REQUIRED_CHECKS: frozenset[str] = frozenset()  # names of checks whose skipping turns the verdict; by default none


@dataclass(frozen=True, slots=True)
class Policy:
    """What an owner decided.

    `required` are checks that must not be skipped, `witnesses` how many must prove the mapping; for both, `places` says where that is
    written. `limits` is a whole table, as LIMITS. `suite` is the JSON text of a statistics suite, "" for the one that is shipped.
    """

    required: frozenset[str] = REQUIRED_CHECKS
    witnesses: int = 0
    limits: Mapping[LimitsRow, Mapping[str, float]] = field(default_factory=lambda: LIMITS)
    suite: str = ""
    waivers: tuple[Waiver, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)


def dtype_code(name: str) -> str:
    """Return the safetensors code of a dtype, however it is spelled.

    Args:
        name: "BF16", "bfloat16" or "torch.bfloat16".

    Returns:
        The code; unknown names come back unchanged.
    """
    return _CODES.get(name.removeprefix("torch."), name)


def limits_row(release_dtype: str, source_dtype: str, computed_in: str, *, is_moe: bool) -> LimitsRow:
    """Return the name of the limits that the coarsest of three dtypes allows.

    Args:
        release_dtype: what the weights are stored in; any spelling, "" where it played no part.
        source_dtype: what the checkpoint's weights are stored in.
        computed_in: what the reference forward was computed in.
        is_moe: whether the model routes tokens to experts.

    Returns:
        A key of LIMITS.

    Raises:
        RequestError: a dtype has no row, or all three are "".
    """
    codes = [dtype_code(name) for name in (release_dtype, source_dtype, computed_in) if name]
    unknown = [code for code in codes if code not in _COARSENESS]
    if unknown or not codes:
        raise RequestError(
            f"no limits for logits in {name_some(unknown)}.",
            remedy=f"Limits exist for {name_some(_COARSENESS)}; add a row to validators/policy.py or skip the logits.",
        )
    coarsest = max(codes, key=_COARSENESS.__getitem__)
    dense: dict[str, tuple[LimitsRow, LimitsRow]] = {"F16": ("F16", "F16 MoE"), "BF16": ("BF16", "BF16 MoE")}
    return dense.get(coarsest, ("F32", "F32 MoE"))[is_moe]


def quantized_row(encodings: Iterable[tuple[str, int]], *, is_moe: bool) -> LimitsRow:
    """Return the name of the limits that the coarsest of some encodings allows.

    Args:
        encodings: kind and bits of each; at least one.
        is_moe: whether the model routes tokens to experts.

    Returns:
        A key of LIMITS.
    """
    order = list(_ENCODING_ROWS)
    return _ENCODING_ROWS[max(encodings, key=order.index)][is_moe]


def cast_limits(row: LimitsRow, noise_floor: float, table: Mapping[LimitsRow, Mapping[str, float]] = LIMITS) -> Mapping[str, float]:
    """Return the limits of a cast: those of its row, with the mean KL held near the noise floor.

    Args:
        row: a key of LIMITS.
        noise_floor: mean KL of an honest cast (or, without a cast, of a repeated forward) measured in the same run.
        table: the policy's limits.

    Returns:
        The row, `mean_kl` at most FLOOR_FACTOR times the floor and never above the row's own number.
    """
    allowed = max(SMALLEST_MEAN_KL, FLOOR_FACTOR * noise_floor)
    return {**table[row], "mean_kl": min(table[row]["mean_kl"], allowed)}
