"""DeepSeek-V3 as Megatron's ranks hold it (latent attention, router bias, shared experts, a dense first layer, a prediction layer).

Rank files are made by hand from a tiny model of transformers. The release must be that model, bit for bit, and written as ranks it must be
those files. No forward pass of Megatron is compared.
"""

import argparse
import re
from pathlib import Path

import pytest
import torch

from flows.reshard_megatron import MegatronRequest, write_megatron_save
from tasks.engine.families.families import find_family
from tasks.engine.formats.readers import open_checkpoint
from tasks.engine.planning.planner import PlanRequest, make_plan
from tests.builders.megatron import Tensors, saved_bytes
from tests.builders.megatron_files import load_rank, same_bits
from tests.contract.assembled import assemble, same_bytes

LAYERS, EXPERTS = 3, 4
# Published name below `self_attn` → Megatron's, and the dim it is cut on (None: whole on every rank)
ATTENTION = {
    "q_proj.weight": ("linear_q_proj.weight", 0),
    "q_a_proj.weight": ("linear_q_down_proj.weight", None),
    "q_a_layernorm.weight": ("linear_q_up_proj.layer_norm_weight", None),
    "q_b_proj.weight": ("linear_q_up_proj.weight", 0),
    "kv_a_proj_with_mqa.weight": ("linear_kv_down_proj.weight", None),
    "kv_a_layernorm.weight": ("linear_kv_up_proj.layer_norm_weight", None),
    "kv_b_proj.weight": ("linear_kv_up_proj.weight", 0),
    "o_proj.weight": ("linear_proj.weight", 1),
}


def _model(q_lora: int | None):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"vocab_size": 20, "kv_lora_rank": 8, "q_lora_rank": q_lora, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
        **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 10},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False},
    )
    return config, DeepseekV3ForCausalLM(config)


def _published(model: torch.nn.Module, folder: Path) -> Tensors:
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)  # type: ignore[operator]
    held = {name: torch.randn(value.shape) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return held


def _gated(held: Tensors, prefix: str, tp: int) -> Tensors:
    gate, up = (held[f"{prefix}.{part}_proj.weight"].chunk(2)[tp] for part in ("gate", "up"))
    return {"linear_fc1.weight": torch.cat([gate, up]), "linear_fc2.weight": held[f"{prefix}.down_proj.weight"].chunk(2, 1)[tp]}


def _rank(held: Tensors, tp: int) -> Tensors:
    made = {"embedding.word_embeddings.weight": held["model.embed_tokens.weight"].chunk(2)[tp]}
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}", f"decoder.layers.{layer}"
        made[f"{to}.input_layernorm.weight"] = held[f"{at}.input_layernorm.weight"]
        for name, (own, dim) in ATTENTION.items():
            value = held.get(f"{at}.self_attn.{name}")
            if value is not None:
                made[f"{to}.self_attention.{own}"] = value if dim is None else value.chunk(2, dim)[tp]
        norm = held[f"{at}.post_attention_layernorm.weight"]
        if layer == 0:
            made[f"{to}.mlp.linear_fc1.layer_norm_weight"] = norm
            made |= {f"{to}.mlp.{name}": value for name, value in _gated(held, f"{at}.mlp", tp).items()}
            continue
        made[f"{to}.pre_mlp_layernorm.weight"] = norm
        made[f"{to}.mlp.router.weight"] = held[f"{at}.mlp.gate.weight"]
        made[f"{to}.mlp.router.expert_bias"] = held[f"{at}.mlp.gate.e_score_correction_bias"]
        made |= {f"{to}.mlp.shared_experts.{n}": v for n, v in _gated(held, f"{at}.mlp.shared_experts", tp).items()}
        for expert in range(EXPERTS):
            own = _gated(held, f"{at}.mlp.experts.{expert}", tp)
            made |= {f"{to}.mlp.experts.{name}{expert}": value for name, value in own.items()}
    made["decoder.final_layernorm.weight"] = held["model.norm.weight"]
    made["output_layer.weight"] = held["lm_head.weight"].chunk(2)[tp]
    return made


def _with_prediction(held: Tensors) -> Tensors:
    """The published tensors of a model whose last layer became a prediction layer: its own tensors, and copies of embedding and head."""
    last = f"model.layers.{LAYERS - 1}"
    own = {f"{last}.{name}.weight": torch.randn(16) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {
        **held,
        **own,
        f"{last}.eh_proj.weight": torch.randn(16, 32),
        f"{last}.embed_tokens.weight": held["model.embed_tokens.weight"].clone(),
        f"{last}.shared_head.head.weight": held["lm_head.weight"].clone(),
    }


def _predicting_rank(held: Tensors, tp: int) -> Tensors:
    """A rank's file, in which that layer is Megatron's first prediction layer."""
    last, to = f"decoder.layers.{LAYERS - 1}.", "mtp.layers.0."
    made = {name.replace(last, f"{to}transformer_layer."): value for name, value in _rank(held, tp).items()}
    published = f"model.layers.{LAYERS - 1}"
    made |= {f"{to}{name}.weight": held[f"{published}.{name}.weight"] for name in ("enorm", "hnorm")}
    made[f"{to}final_layernorm.weight"] = held[f"{published}.shared_head.norm.weight"]
    made[f"{to}eh_proj.weight"] = held[f"{published}.eh_proj.weight"].chunk(2)[tp]
    return made


@pytest.mark.parametrize("q_lora", [12, None])
def test_latent_attention_and_shared_experts_come_back(q_lora, tmp_path):
    config, model = _model(q_lora)
    held = _published(model, tmp_path / "hf")
    args = {"tensor_model_parallel_size": 2, "num_layers": LAYERS, "num_experts": EXPERTS, "multi_latent_attention": True, "swiglu": True}
    args |= {"q_lora_rank": q_lora, "kv_lora_rank": 8, "qk_pos_emb_head_dim": 4, "moe_ffn_hidden_size": 10, "hidden_size": 16}
    for tp in range(2):
        folder = tmp_path / "ckpt" / f"mp_rank_{tp:02d}"
        folder.mkdir(parents=True)
        saved = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": 1,
            "model": {name: value.clone() for name, value in _rank(held, tp).items()},
        }
        (folder / "model_optim_rng.pt").write_bytes(saved_bytes(saved))
    reader = open_checkpoint(tmp_path / "ckpt")
    family = find_family(config.to_dict())
    assert family is not None
    dims = family.dims(config.to_dict())
    plan = make_plan(reader.catalog(), PlanRequest(family, dims, family.expectation(dims), dtype="BF16"))
    assert {tensor.name for _, tensor in plan.tensors()} == set(held)
    assert plan.dropped == ()
    assert all(tensor.dtype == "F32" for _, tensor in plan.tensors() if tensor.name.endswith("e_score_correction_bias"))
    for _, tensor in plan.tensors():
        (box,) = tensor.inputs
        whole = assemble(reader, box.name, box.full_shape)
        part = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        assert same_bytes(part, held[tensor.name]), tensor.name


@pytest.mark.parametrize("q_lora", [12, None])
def test_the_model_written_as_ranks_is_what_the_ranks_hold(q_lora, tmp_path):
    _, model = _model(q_lora)
    held = _published(model, tmp_path / "hf")
    (tmp_path / "made").mkdir()
    ranks = {"tp": 2, "pp": 1, "ep": 1, "etp": 2, "vpp": 1}
    write_megatron_save(
        MegatronRequest(tmp_path / "hf", (), None, "", None, "auto", ranks, (), "transformer_engine", 10), tmp_path / "made"
    )
    for tp in range(2):
        saved = load_rank(tmp_path / "made/release" / f"mp_rank_{tp:02d}")
        found = {name: value for name, value in saved["model"].items() if value is not None}  # type: ignore[attr-defined]
        expected = _rank(held, tp)
        single = {
            re.sub(r"\.experts\.(linear_fc\d)\.weight(\d)$", r".experts.local_experts.\2.\1.weight", n): v for n, v in expected.items()
        }
        assert same_bits(found, single)
    args = vars(saved["args"])  # type: ignore[arg-type]
    assert (args["q_lora_rank"], args["kv_lora_rank"], args["qk_head_dim"], args["v_head_dim"]) == (q_lora, 8, 6, 8)
    assert args["moe_layer_freq"] == [0, 1, 1]
