"""config.json describes the tensors that lie beside it, and is fit to be loaded.

Dims are read off the headers independently of any family: DIMS says, for the model types whose names mean what Llama's or GPT-2's mean,
which tensor shows which field. Other model types are judged by shapes alone (the `shapes` check). Fields of a `text_config` count where the
top level has none.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from reports.codes import finding
from validators.check import Check, Judgement, Outcome, judge
from validators.config_sense import judge_sense
from validators.expectation import Evidence
from validators.measured import role_of
from validators.policy import LARGEST_EPS, UNQUANTIZED, dtype_code
from validators.quantization import read_quantization
from validators.release import Release
from validators.shapes import main_dtype, whole_tensors

Config = Mapping[str, object]

# Spellings of a field; the first one that is there counts, and all that are there must agree. GPT-2's come second.
SPELLINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("num_hidden_layers", "n_layer"),
        "hidden": ("hidden_size", "n_embd"),
        "heads": ("num_attention_heads", "n_head"),
        "kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "intermediate": ("intermediate_size", "n_inner"),
        "moe_intermediate": ("moe_intermediate_size",),
        "vocabulary": ("vocab_size",),
        "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
        "eps": ("rms_norm_eps", "layer_norm_epsilon"),
        "positions": ("max_position_embeddings", "n_positions"),
    }
)


@dataclass(frozen=True, slots=True)
class _Dims:
    """The whole numbers of a config; 0 where a field is absent."""

    layers: int
    hidden: int
    vocabulary: int
    query: int  # heads x head_dim
    key: int  # key-value heads x head_dim
    intermediate: int
    moe_intermediate: int
    experts: int


@dataclass(frozen=True, slots=True)
class _DimRow:
    """Tensors whose role ends in `suffix` show a field: dim `dim` must be `length(dims)`."""

    suffix: str
    dim: int
    code: str
    length: Callable[[_Dims], int]


_LLAMA = (
    _DimRow("embed_tokens.weight", 0, "config.vocabulary", lambda dims: dims.vocabulary),
    _DimRow("embed_tokens.weight", 1, "config.hidden", lambda dims: dims.hidden),
    _DimRow("self_attn.q_proj.weight", 0, "config.heads", lambda dims: dims.query),
    _DimRow("self_attn.o_proj.weight", 1, "config.heads", lambda dims: dims.query),
    _DimRow("self_attn.k_proj.weight", 0, "config.kv-heads", lambda dims: dims.key),
    _DimRow("self_attn.v_proj.weight", 0, "config.kv-heads", lambda dims: dims.key),
    _DimRow("*.mlp.gate_proj.weight", 0, "config.intermediate", lambda dims: dims.intermediate),
    _DimRow("*.mlp.up_proj.weight", 0, "config.intermediate", lambda dims: dims.intermediate),
    _DimRow("*.mlp.down_proj.weight", 1, "config.intermediate", lambda dims: dims.intermediate),
)
_QWEN_MOE = (
    _DimRow("experts.*.gate_proj.weight", 0, "config.intermediate", lambda dims: dims.moe_intermediate),
    _DimRow("experts.*.down_proj.weight", 1, "config.intermediate", lambda dims: dims.moe_intermediate),
    _DimRow("*.mlp.gate.weight", 0, "config.experts", lambda dims: dims.experts),
)
_MIXTRAL = (
    _DimRow("experts.*.w1.weight", 0, "config.intermediate", lambda dims: dims.intermediate),
    _DimRow("experts.*.w2.weight", 1, "config.intermediate", lambda dims: dims.intermediate),
    _DimRow("block_sparse_moe.gate.weight", 0, "config.experts", lambda dims: dims.experts),
)
_GPT2 = (
    _DimRow("wte.weight", 0, "config.vocabulary", lambda dims: dims.vocabulary),
    _DimRow("wte.weight", 1, "config.hidden", lambda dims: dims.hidden),
    _DimRow("attn.c_attn.weight", 1, "config.heads", lambda dims: 3 * dims.query),
    _DimRow("mlp.c_fc.weight", 1, "config.intermediate", lambda dims: dims.intermediate or 4 * dims.hidden),
)
DIMS: Mapping[str, Sequence[_DimRow]] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "qwen2_moe": (*_LLAMA, *_QWEN_MOE),
        "qwen3_moe": (*_LLAMA, *_QWEN_MOE),
        "mixtral": (*_LLAMA, *_MIXTRAL),
        "deepseek_v3": (*_LLAMA[:2], *_LLAMA[-3:], *_QWEN_MOE),
        "gpt2": _GPT2,
    }
)
# Model types whose classes are called as they are. Others (custom code, text halves of larger models) are not judged by their name.
NAMED_ALIKE = frozenset(
    {
        *(
            "llama",
            "llama4",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gpt2",
            "gpt_neo",
            "gpt_neox",
            "gptj",
            "opt",
        ),
        *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "phi", "phi3", "falcon", "bloom", "mpt", "olmo", "olmo2", "olmoe"),
        *(
            "cohere",
            "cohere2",
            "starcoder2",
            "stablelm",
            "granite",
            "granitemoe",
            "glm",
            "glm4",
            "gpt_oss",
            "mamba",
            "mamba2",
            "jamba",
            "dbrx",
        ),
        *(
            "bert",
            "roberta",
            "xlm-roberta",
            "deberta-v2",
            "modernbert",
            "t5",
            "bart",
            "smollm3",
            "nemotron",
            "exaone4",
            "ernie4_5",
            "minimax",
        ),
    }
)
_CLASS = re.compile(r"(\w+?)(?:For[A-Z]\w*|Model|LMHeadModel|PreTrainedModel)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def examine(evidence: Evidence) -> Outcome:
    """Hold config.json against the headers, and its fields against each other.

    Args:
        evidence: headers and config.

    Returns:
        Findings, and the number of judgements made.
    """
    config, release = evidence.release.config, evidence.release
    if not config:
        return Outcome((finding("config.absent", "config.json", expected="a file", found="none"),), 1)
    judgements = [
        *_judge_identity(config),
        *_judge_architectures(config),
        *_judge_spellings(config),
        *_judge_dims(config, release),
        *_judge_rope(config),
        *_judge_numbers(config),
        *_judge_dtype(config, release),
        *judge_sense(config, release.generation_config),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"model_type": str(config.get("model_type", ""))})


def read_field(config: Config, *spellings: str) -> object:
    """Return a field of a config, from the top level or else from `text_config`.

    Args:
        config: parsed config.json.
        *spellings: names of the field; the first that is set counts.

    Returns:
        The value; None where the field is absent or null.
    """
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        for spelling in spellings:
            if level.get(spelling) is not None:
                return level[spelling]
    return None


def _whole(config: Config, field: str) -> int:
    value = read_field(config, *_READ.get(str(config.get("model_type")), SPELLINGS).get(field, SPELLINGS[field]))
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


# Where a model reads fewer spellings than there are: fields it does not know may say anything.
_READ: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"gpt2": {"intermediate": ("n_inner",), "kv_heads": ("n_head",), "head_dim": ()}}
)


def _dims(config: Config) -> _Dims:
    heads, hidden = _whole(config, "heads"), _whole(config, "hidden")
    head_dim = _whole(config, "head_dim") or (hidden // heads if heads else 0)
    return _Dims(
        layers=_whole(config, "layers"),
        hidden=hidden,
        vocabulary=_whole(config, "vocabulary"),
        query=heads * head_dim,
        key=(_whole(config, "kv_heads") or heads) * head_dim,
        intermediate=_whole(config, "intermediate"),
        moe_intermediate=_whole(config, "moe_intermediate"),
        experts=_whole(config, "experts"),
    )


def _judge(code: str, field: str, *, right: bool, expected: str, found: str) -> Judgement:
    return judge(code, f"config.json: {field}" if field else "config.json", right=right, expected=expected, found=found)


def _judge_identity(config: Config) -> Iterator[Judgement]:
    rows = (("config.model-type", "model_type", "a name"), ("config.architectures", "architectures", "a class name"))
    for code, field, expected in rows:
        yield _judge(code, field, right=bool(config.get(field)), expected=expected, found="absent")


def _judge_architectures(config: Config) -> Iterator[Judgement]:
    # Beyond doubt only when the class is another known model's.
    model_type, classes = config.get("model_type"), config.get("architectures")
    known = {name.replace("_", "").replace("-", ""): name for name in NAMED_ALIKE}
    if model_type not in NAMED_ALIKE or not isinstance(classes, list) or config.get("auto_map"):
        return
    for name in classes:
        match = _CLASS.fullmatch(str(name))
        theirs = known.get(match[1].lower()) if match else None
        if theirs is not None:
            right = theirs == model_type
            yield _judge("config.architecture-differs", "architectures", right=right, expected=f"a class of {model_type}", found=str(name))


def _judge_spellings(config: Config) -> Iterator[Judgement]:
    for spellings in SPELLINGS.values():
        said = {spelling: config[spelling] for spelling in spellings if config.get(spelling) is not None}
        if len(said) > 1:
            alike = len({str(value) for value in said.values()}) == 1
            yield _judge("config.spellings", spellings[0], right=alike, expected="one value", found=f"{said}")


def _judge_dims(config: Config, release: Release) -> Iterator[Judgement]:
    rows = DIMS.get(str(config.get("model_type")), ())
    dims, said = _dims(config), read_quantization(release)
    shapeless = said.encoded if said.unjudged else frozenset[str]()  # of parts whose format is not known, shapes say nothing
    for tensor in release.stored():
        if tensor.name in shapeless:
            continue
        role = role_of(tensor.name)
        for row in rows:
            if not role.endswith(row.suffix) or len(tensor.shape) <= row.dim:
                continue
            want, length = row.length(dims), tensor.shape[row.dim]
            yield _judge(row.code, "", right=want == length, expected=f"{want}", found=f"{length} in dim {row.dim} of {role}")
    if rows:
        promised = config.get("num_nextn_predict_layers")  # layers behind the model's, which not every release has
        yield from _judge_count("config.layers", _LAYER, dims.layers, release, more=promised if type(promised) is int else 0)
        yield from _judge_count("config.experts", _EXPERT, dims.experts, release)


def _judge_count(code: str, pattern: re.Pattern[str], want: int, release: Release, more: int = 0) -> Iterator[Judgement]:
    ids = {int(match[1]) for tensor in release.stored() if (match := pattern.search(tensor.name))}
    count = max(ids, default=-1) + 1
    if count:
        yield _judge(code, "", right=want <= count <= want + more, expected=f"{want}", found=f"ids 0 to {count - 1} stored")


def _judge_rope(config: Config) -> Iterator[Judgement]:
    parameters, scaling = read_field(config, "rope_parameters"), read_field(config, "rope_scaling")
    new = parameters if isinstance(parameters, Mapping) else {}
    old = scaling if isinstance(scaling, Mapping) else {}
    # Field, its older spelling's value, its newer one's, and what readers of the older one take it for when it is absent.
    rows = (
        ("rope_theta", read_field(config, "rope_theta"), new.get("rope_theta"), 10000.0),
        ("rope_type", old.get("rope_type", old.get("type")), new.get("rope_type"), "default"),
        ("factor", old.get("factor"), new.get("factor"), None),
    )
    for field, before, now, fallback in rows:
        if before is not None and now is not None:
            yield _judge("config.rope-spellings", field, right=before == now, expected=f"{now}", found=f"{before}")
        elif now is not None and fallback is not None:
            expected = f"{now} in both spellings"
            yield _judge("config.rope-one-spelling", field, right=now == fallback, expected=expected, found="in rope_parameters only")
    theta = new.get("rope_theta", read_field(config, "rope_theta"))
    if theta is not None:
        right = _is_between(theta, 0, sys.float_info.max)
        yield _judge("config.rope-theta", "rope_theta", right=right, expected="above 0", found=f"{theta}")


def _judge_numbers(config: Config) -> Iterator[Judgement]:
    rows = (("eps", "config.eps", 0.0, LARGEST_EPS), ("positions", "config.max-position", 0.0, sys.float_info.max))
    for field, code, above, most in rows:
        value = read_field(config, *SPELLINGS[field])
        if value is not None:
            expected = f"above {above:g}, at most {most:g}"
            yield _judge(code, SPELLINGS[field][0], right=_is_between(value, above, most), expected=expected, found=f"{value}")


def _judge_dtype(config: Config, release: Release) -> Iterator[Judgement]:
    new, old, written = read_field(config, "dtype"), read_field(config, "torch_dtype"), main_dtype(whole_tensors(release))
    for field, value in (("dtype", new), ("torch_dtype", old)):
        if value is not None and written in UNQUANTIZED:
            yield _judge("config.dtype", field, right=dtype_code(str(value)) == written, expected=written, found=f"{value}")
    if new is not None and old is not None:
        right = dtype_code(str(new)) == dtype_code(str(old))
        yield _judge("config.dtype-spellings", "dtype", right=right, expected=f"{old} (torch_dtype)", found=f"{new}")


def _is_between(value: object, above: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most


CHECK = Check("config", ("config",), examine)
