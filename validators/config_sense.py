"""What config.json and generation_config.json say makes sense by itself: known names, fields in range, numbers that fit each other.

A part of the `config` check. Names are those that public loaders know; a model with code of its own (`auto_map`) may have others and is not
judged by them. Each level of a config (the top, `text_config`) is judged by its own fields.

Source: transformers 5.24, activations.py, modeling_rope_utils.py, configuration_utils.py and generation/logits_process.py; vLLM's
rotary_embedding names what only serving engines know.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from validators.check import Judgement, judge

_Fields = Mapping[str, object]

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")
ACTIVATIONS = frozenset(
    {
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "gelu_pytorch_tanh"),
        *("hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu"),
        *("sqrtsoftplus", "swish", "tanh", "xielu"),
        *("geglu", "swiglu", "swigluoai", "gelu_and_mul", "silu_and_mul"),  # of serving engines only
    }
)
ROPE_TYPES = frozenset(
    {
        *("default", "axial", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional"),
        *("ntk", "ntk_alpha", "xdrope", "fope", "mllama4", "deepseek_yarn", "deepseek_llama_scaling"),  # of one family each
    }
)
TOKEN_ID_FIELDS = tuple(
    f"{token}_token_id" for token in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start", "forced_bos", "forced_eos")
)
_FORCED_IDS = ("forced_bos_token_id", "forced_eos_token_id")
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_LARGEST = 2**64  # a whole number from here on is no count of anything
_PREDICTED_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # some list their types too


@dataclass(frozen=True, slots=True)
class _Range:
    """What a field may be; `expected` says it in words."""

    expected: str
    holds: Callable[[object], bool]


def _number(value: object) -> float:
    # NaN, which is in no range, for what is no number, or none that a float holds.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if isinstance(value, float) or abs(value) < _LARGEST else math.nan


def _is_positive(value: object) -> bool:
    return 0 < _number(value) < math.inf


def _are_positive(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_positive, value))


_POSITIVE = _Range("a number above 0", _is_positive)
_FACTORS = _Range("numbers above 0", _are_positive)
# The fields that a RoPE type cannot be computed without, and what they may be.
ROPE_FIELDS: Mapping[str, Mapping[str, _Range]] = MappingProxyType(
    {
        "linear": {"factor": _POSITIVE},
        "dynamic": {"factor": _POSITIVE},
        "yarn": {"factor": _POSITIVE},
        "longrope": {"short_factor": _FACTORS, "long_factor": _FACTORS},
        "su": {"short_factor": _FACTORS, "long_factor": _FACTORS},
        "llama3": {
            "factor": _POSITIVE,
            "low_freq_factor": _POSITIVE,
            "high_freq_factor": _POSITIVE,
            "original_max_position_embeddings": _POSITIVE,
        },
    }
)
# 0 turns top_k off; temperature 0 is greedy for most engines.
GENERATION_RANGES: Mapping[str, _Range] = MappingProxyType(
    {
        "temperature": _Range("0 or more", lambda value: 0 <= _number(value) < math.inf),
        "top_p": _Range("above 0, at most 1", lambda value: 0 < _number(value) <= 1),
        "min_p": _Range("0 to 1", lambda value: 0 <= _number(value) <= 1),
        "top_k": _Range("0 or more", lambda value: _number(value) >= 0),
        "repetition_penalty": _POSITIVE,
        "num_beams": _Range("1 or more", lambda value: _number(value) >= 1),
        "max_new_tokens": _POSITIVE,
    }
)


def judge_sense(config: _Fields, generation: _Fields) -> Iterator[Judgement]:
    """Judge what needs no tensor and no tokenizer to be seen wrong.

    Args:
        config: parsed config.json.
        generation: parsed generation_config.json; empty when there is none.

    Yields:
        A judgement for every field that was looked at.
    """
    levels = dict(_levels(config))
    vocabulary = max((size for level in levels.values() if isinstance(size := level.get("vocab_size"), int)), default=0)
    for prefix, level in levels.items():
        if not config.get("auto_map"):
            yield from _judge_activations(prefix, level)
            yield from _judge_layer_types(prefix, level)
        trained = {key: level[key] for key in ("original_max_position_embeddings",) if level.get(key)}  # some write it outside
        for where, rope in _ropes(prefix, level):
            yield from _judge_rope(where, trained | dict(rope), is_public=not config.get("auto_map"))
        yield from _judge_groups(prefix, level)
        yield from _judge_ids(prefix, level, vocabulary)
    yield from _judge_ids("generation_config.json: ", generation, vocabulary)
    yield from _judge_generation(generation)


def _levels(config: _Fields) -> Iterator[tuple[str, _Fields]]:
    yield "config.json: ", config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield "config.json: text_config.", text


def _judge_activations(prefix: str, level: _Fields) -> Iterator[Judgement]:
    for field in ACTIVATION_FIELDS:
        name = level.get(field)
        if name is not None:
            right = isinstance(name, str) and name in ACTIVATIONS
            yield judge("config.activation", prefix + field, right=right, expected="a known activation, as silu or gelu", found=f"{name}")


def _judge_layer_types(prefix: str, level: _Fields) -> Iterator[Judgement]:
    types, count = level.get("layer_types"), level.get("num_hidden_layers")
    if isinstance(types, list) and isinstance(count, int):
        more = next((n for field in _PREDICTED_LAYERS if isinstance(n := level.get(field), int)), 0)
        right = len(types) in (count, count + more)
        yield judge("config.layer-types", f"{prefix}layer_types", right=right, expected=f"{count} types", found=f"{len(types)}")


def _ropes(prefix: str, level: _Fields) -> Iterator[tuple[str, _Fields]]:
    # Both spellings; the newer one may hold one set of fields per type of layer.
    for spelling in ("rope_scaling", "rope_parameters"):
        held = level.get(spelling)
        if not isinstance(held, Mapping):
            continue
        nested = {key: value for key, value in held.items() if isinstance(value, Mapping)}
        if nested:
            yield from ((f"{prefix}{spelling}.{key}", value) for key, value in nested.items())
        else:
            yield f"{prefix}{spelling}", held


def _judge_rope(where: str, rope: _Fields, *, is_public: bool) -> Iterator[Judgement]:
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None:
        return
    if is_public:
        right = isinstance(kind, str) and kind in ROPE_TYPES
        yield judge("config.rope-type", where, right=right, expected="a known RoPE type, as default, yarn or llama3", found=f"{kind}")
    for field, allowed in ROPE_FIELDS.get(str(kind), {}).items():
        if rope.get(field) is None:
            yield judge("config.rope-field-missing", where, right=False, expected=f"{field}, which {kind} needs", found="absent")
        else:
            right = allowed.holds(rope[field])
            yield judge("config.rope-range", f"{where}.{field}", right=right, expected=allowed.expected, found=f"{rope[field]}")
    low, high = _number(rope.get("low_freq_factor")), _number(rope.get("high_freq_factor"))
    if kind == "llama3" and not math.isnan(low + high):
        yield judge("config.rope-range", where, right=low < high, expected=f"low_freq_factor below {high:g}", found=f"{low:g}")
    short, long = rope.get("short_factor"), rope.get("long_factor")
    if isinstance(short, list) and isinstance(long, list):
        right = len(short) == len(long)
        yield judge("config.rope-range", where, right=right, expected="as many short factors as long", found=f"{len(short)}, {len(long)}")


def _judge_groups(prefix: str, level: _Fields) -> Iterator[Judgement]:
    experts = next((n for field in _EXPERT_COUNTS if isinstance(n := level.get(field), int)), 0)
    groups, chosen = level.get("n_group"), level.get("topk_group")
    if not isinstance(groups, int) or groups < 1:  # null or 0 where experts have no groups
        return
    if experts:
        right = experts % groups == 0
        yield judge("config.expert-groups", f"{prefix}n_group", right=right, expected=f"a divisor of {experts} experts", found=f"{groups}")
    if isinstance(chosen, int):
        yield judge("config.expert-groups", f"{prefix}topk_group", right=chosen <= groups, expected=f"at most {groups}", found=f"{chosen}")


def _judge_ids(prefix: str, fields: _Fields, vocabulary: int) -> Iterator[Judgement]:
    for field in TOKEN_ID_FIELDS:
        value = fields.get(field)
        if value is None:
            continue
        ids: Sequence[object] = value if isinstance(value, list) else [value]
        right = all(isinstance(index, int) and not isinstance(index, bool) for index in ids)
        yield judge("config.token-id-type", prefix + field, right=right, expected="whole numbers", found=f"{value!r}")
        if right and vocabulary and field in _FORCED_IDS:
            inside = all(0 <= _number(index) < vocabulary for index in ids)
            yield judge("config.forced-token", prefix + field, right=inside, expected=f"ids below {vocabulary}", found=f"{value}")


def _judge_generation(generation: _Fields) -> Iterator[Judgement]:
    for field, allowed in GENERATION_RANGES.items():
        value = generation.get(field)
        if value is not None:
            right, where = allowed.holds(value), f"generation_config.json: {field}"
            yield judge("config.generation-range", where, right=right, expected=allowed.expected, found=f"{value}")
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        low, high = _number(generation.get(least)), _number(generation.get(most))
        is_overruled = most == "max_length" and generation.get("max_new_tokens") is not None
        if not math.isnan(low + high) and not is_overruled:
            where = f"generation_config.json: {least}"
            yield judge("config.generation-lengths", where, right=low <= high, expected=f"at most {high:g} ({most})", found=f"{low:g}")
