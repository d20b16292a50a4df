"""config.json and generation_config.json say what those of a reference say: the trainer's assets, or an earlier release.

A config can be sound by itself and describe another model: rope scaling lost, epsilon of another size, one expert fewer per token. Fields
are compared by what they mean (FIELDS): their spellings in older and newer configs, and what a loader takes an absent one for. A field
that FIELDS does not know is a warning, one that no forward pass reads (SILENT) is not compared.

Source: transformers 5.14, configuration_*.py (spellings, defaults) and modeling_rope_utils.py (rope_parameters).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reports.codes import finding
from validators.check import Check, Judgement, Outcome, judge
from validators.config import SPELLINGS, read_field
from validators.expectation import Evidence

Config = Mapping[str, object]

UNKNOWN = "unknown"  # what an absent field means depends on the model's class


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a config: the code of its drift, its spellings (the first that is there counts), what absence means."""

    code: str
    spellings: tuple[str, ...]
    absent: object = UNKNOWN


_ROPE, _DIMS, _ROUTING, _FORWARD, _POSITIONS = (
    *("config_drift.rope", "config_drift.dims", "config_drift.routing", "config_drift.forward"),
    "config_drift.positions",
)
FIELDS: tuple[_Field, ...] = (
    _Field("config_drift.architecture", ("model_type",)),
    _Field("config_drift.architecture", ("architectures",)),
    *(_Field(_DIMS, SPELLINGS[key]) for key in ("layers", "hidden", "heads", "intermediate", "moe_intermediate", "experts")),
    *(_Field(_DIMS, (name,)) for name in ("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace")),
    *(_Field(_DIMS, (name,)) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    *(_Field(_DIMS, (name,)) for name in ("decoder_sparse_step", "mlp_only_layers", "num_nextn_predict_layers")),
    _Field("config_drift.eps", ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")),
    _Field(_POSITIONS, SPELLINGS["positions"]),
    _Field(_POSITIONS, ("sliding_window",), None),
    _Field(_POSITIONS, ("use_sliding_window",), False),
    _Field(_POSITIONS, ("layer_types",)),
    _Field(_ROPE, ("partial_rotary_factor", "rotary_pct"), 1.0),
    _Field(_ROPE, ("rope_interleave",)),
    _Field(_ROPE, ("rope_local_base_freq",)),
    _Field(_ROUTING, ("num_experts_per_tok", "moe_top_k", "top_k")),
    _Field(_ROUTING, ("norm_topk_prob",)),
    _Field(_ROUTING, ("routed_scaling_factor",)),
    _Field(_ROUTING, ("scoring_func",)),
    _Field(_ROUTING, ("topk_method",)),
    _Field(_ROUTING, ("n_group",)),
    _Field(_ROUTING, ("topk_group",)),
    _Field(_FORWARD, ("hidden_act", "hidden_activation", "activation_function")),
    _Field(_FORWARD, ("attention_bias", "qkv_bias")),
    _Field(_FORWARD, ("mlp_bias",), False),
    _Field(_FORWARD, ("scale_attn_weights",), True),
    _Field(_FORWARD, ("scale_attn_by_inverse_layer_idx",), False),
    *(_Field(_FORWARD, (name,)) for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")),
    *(_Field(_FORWARD, (name,), 1.0) for name in ("logits_scaling", "embedding_multiplier", "residual_multiplier")),
    _Field(_FORWARD, ("attention_multiplier",)),
    _Field("config_drift.special-ids", ("bos_token_id",)),
    _Field("config_drift.special-ids", ("eos_token_id",)),
    _Field("config_drift.padding", ("pad_token_id",)),
)
# Judged elsewhere, read by no forward pass, or said again by every writer.
SILENT = frozenset(
    {
        *("transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path", "initializer_range", "pretraining_tp"),
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "dropout", "summary_type"),
        *("summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "task_specific_params"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("rope_theta", "rope_scaling", "rope_parameters", "num_key_value_heads", "head_dim", "quantization_config", "text_config"),
        *("_attn_implementation_autoset", "_attn_implementation", "gradient_checkpointing", "return_dict", "output_hidden_states"),
        *("output_attentions", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type", "auto_map"),
        *("add_cross_attention", "cross_attention_hidden_size", "is_decoder", "reorder_and_upcast_attn", "unsloth_version"),
    }
)
_SAME_WORD = MappingProxyType({"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "su": "longrope", "mrope": "default"})
_STOPS = MappingProxyType({"bos_token_id": "bos", "eos_token_id": "eos"})


def examine(evidence: Evidence) -> Outcome:
    """Hold the release's config and generation config against the reference's.

    Args:
        evidence: a release, and a reference with a config.

    Returns:
        Findings, and the number of judgements made.
    """
    reference = evidence.reference
    assert reference is not None
    ours, theirs = evidence.release.config, reference.config
    if not ours:
        return Outcome((finding("config_drift.absent", "config.json", expected="one, as the reference has", found="none"),), 1)
    judgements = [
        *(_judge_field(row, ours, theirs, reference.defaults) for row in FIELDS),
        *_judge_derived(ours, theirs),
        *_judge_rope(ours, theirs),
        *_judge_others(ours, theirs),
        *_judge_generation(evidence.release.generation_config, reference.generation_config),
    ]
    findings = tuple(judgement for judgement in judgements if judgement is not None)
    return Outcome(findings, len(judgements), {"reference": reference.folder.name})


def _judge_field(row: _Field, ours: Config, theirs: Config, defaults: Config) -> Judgement:
    where = f"config.json: {row.spellings[0]}"
    found, expected = (_canonical(_read(row, config, defaults)) for config in (ours, theirs))
    if found != expected and UNKNOWN in (found, expected):  # one side leaves it to a class that is not known here
        return judge("config_drift.field", where, right=False, expected=_say(expected), found=_say(found))
    return judge(row.code, where, right=found == expected, expected=_say(expected), found=_say(found))


def _read(row: _Field, config: Config, defaults: Config) -> object:
    # What a loader takes the field for: as said, else as the model's class has it, else what its absence means everywhere.
    said = read_field(config, *row.spellings)
    text = config.get("text_config")
    levels = (config, text if isinstance(text, Mapping) else {})
    if said is not None or any(name in level for level in levels for name in row.spellings):  # null is said too
        return said
    spelled = [name for name in row.spellings if name in defaults]
    return defaults[spelled[0]] if spelled else row.absent


def _judge_derived(ours: Config, theirs: Config) -> Iterator[Judgement]:
    for field, derive in (("num_key_value_heads", _key_heads), ("head_dim", _head_dim)):
        found, expected = derive(ours), derive(theirs)
        yield judge(_DIMS, f"config.json: {field}", right=found == expected, expected=_say(expected), found=_say(found))


def _key_heads(config: Config) -> object:
    return read_field(config, "num_key_value_heads", *SPELLINGS["heads"])


def _head_dim(config: Config) -> object:
    said = read_field(config, "head_dim")
    heads, hidden = read_field(config, *SPELLINGS["heads"]), read_field(config, *SPELLINGS["hidden"])
    return hidden // heads if said is None and isinstance(heads, int) and isinstance(hidden, int) and heads else said


def _judge_rope(ours: Config, theirs: Config) -> Iterator[Judgement]:
    found, expected = _rope(ours), _rope(theirs)
    for key in sorted(found.keys() | expected.keys()):
        right = found.get(key) == expected.get(key)
        yield judge(_ROPE, f"config.json: {key}", right=right, expected=_say(expected.get(key)), found=_say(found.get(key)))


def _rope(config: Config) -> Mapping[str, object]:
    # Both spellings as one flat mapping: rope_parameters of newer configs, rope_theta and rope_scaling of older ones.
    scaling, parameters = read_field(config, "rope_scaling"), read_field(config, "rope_parameters")
    nested = {**(scaling if isinstance(scaling, Mapping) else {}), **(parameters if isinstance(parameters, Mapping) else {})}
    said = {str(key): _canonical(value) for key, value in nested.items() if value is not None}
    said["rope_type"] = said.pop("type", None) if "rope_type" not in said else said["rope_type"]
    theta = said.get("rope_theta", _canonical(read_field(config, "rope_theta", "rotary_emb_base")))
    kind = said["rope_type"] or "default"
    return {**{key: value for key, value in said.items() if key != "type"}, "rope_type": kind, "rope_theta": theta or 10000.0}


def _judge_others(ours: Config, theirs: Config) -> Iterator[Judgement]:
    known = SILENT.union(*(row.spellings for row in FIELDS))
    for key in sorted((ours.keys() & theirs.keys()) - known):
        right = _canonical(ours[key]) == _canonical(theirs[key])
        yield judge("config_drift.field", f"config.json: {key}", right=right, expected=_say(theirs[key]), found=_say(ours[key]))


def _judge_generation(ours: Config, theirs: Config) -> Iterator[Judgement]:
    if not theirs:
        return
    if not ours:
        yield judge("config_drift.generation", "generation_config.json", right=False, expected="one, as the reference has", found="none")
        return
    for key in sorted(theirs.keys() | ours.keys()):
        if key in SILENT or key.startswith("_"):
            continue
        found, expected = _canonical(ours.get(key)), _canonical(theirs.get(key))
        code = "config_drift.stop-ids" if key in _STOPS else "config_drift.generation"
        yield judge(code, f"generation_config.json: {key}", right=found == expected, expected=_say(expected), found=_say(found))


def _canonical(value: object) -> object:
    # One form for what readers take alike: numbers as floats, a list of one as its item, words of the same meaning.
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        return _SAME_WORD.get(value, value)
    if isinstance(value, list):
        items = tuple(_canonical(item) for item in value)
        return items[0] if len(items) == 1 else tuple(sorted(items, key=str)) if all(isinstance(i, float) for i in items) else items
    if isinstance(value, Mapping):
        return tuple((str(key), _canonical(value[key])) for key in sorted(value, key=str))
    return str(value)


def _say(value: object) -> str:
    return "not said" if value is None or value == UNKNOWN else f"{value:g}" if isinstance(value, float) else f"{value}"


CHECK = Check("config_drift", ("folder", "reference_config"), examine)
