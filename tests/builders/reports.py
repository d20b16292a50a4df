"""Reports as runs make them, by hand: a green export, a red one, a hostile one, a huge one."""

import math
import random
from dataclasses import replace

from reports.model import (
    Change,
    CheckResult,
    Finding,
    LogitsComparison,
    Omission,
    Phase,
    Report,
    TensorStatistics,
    Witness,
)

SCRIPT = "<script>alert(1)</script>"
ROLES = {
    "input_layernorm": 1.0,
    "post_attention_layernorm": 0.9,
    "self_attn.q_proj": 0.021,
    "self_attn.k_proj": 0.024,
    "self_attn.v_proj": 0.012,
    "self_attn.o_proj": 0.011,
    "mlp.gate_proj": 0.015,
    "mlp.up_proj": 0.014,
    "mlp.down_proj": 0.013,
}


def statistics(name: str, rms: float, *, error: float = 1.6e-3, nonfinite: int = 0) -> TensorStatistics:
    """One tensor whose numbers follow from its rms."""
    shape = "4096x4096" if "proj" in name else "4096"
    numel = math.prod(int(n) for n in shape.split("x"))
    return TensorStatistics(
        name, "model-00001-of-00004.safetensors", "BF16", shape, 2 * numel, rms * 7.5, rms, rms / 900, nonfinite, 0.0, error
    )


def layers(count: int, experts: int = 0) -> list[TensorStatistics]:
    """A llama's tensors, or with `experts` a mixture's."""
    rng = random.Random(7)
    rows = [statistics("model.embed_tokens.weight", 0.018)]
    for layer in range(count):
        for role, rms in ROLES.items():
            wobble = rms * (1 + 0.1 * rng.random() + 0.4 * layer / count)
            if experts and role.startswith("mlp"):
                name = role.removeprefix("mlp.")
                rows += [
                    statistics(f"model.layers.{layer}.mlp.experts.{e}.{name}.weight", wobble * (1 + 0.2 * rng.random()))
                    for e in range(experts)
                ]
            else:
                rows.append(statistics(f"model.layers.{layer}.{role}.weight", wobble))
    return [*rows, statistics("model.norm.weight", 2.1), statistics("lm_head.weight", 0.02)]


def comparison(name: str, scale: float) -> LogitsComparison:
    """A logits comparison whose divergence is about `scale` nats."""
    rng = random.Random(name)
    return LogitsComparison(
        name=name,  # type: ignore[arg-type]
        reference="recorded" if name == "mapping" else "merged values before the cast",
        candidate="merged values before the cast" if name == "mapping" else "release in BF16",
        limits_row="F32" if name == "mapping" else "BF16",
        positions=512,
        metrics={"mean_kl": scale, "p95_kl": scale * 3, "cosine": 1 - scale, "top1": 0.9985, "max_abs": 41 * scale},
        limits={"mean_kl": scale * 6, "p95_kl": scale * 20, "cosine": 0.9999, "top1": 0.99},
        kl_by_position=tuple(scale * math.exp(rng.gauss(0, 0.7)) for _ in range(128)),
    )


GREEN = Report(
    run_id="2026-11-29T16-04-11Z-export-3f9c2a",
    kind="export",
    action="published",
    subject="/releases/harbour-7b/v1.4",
    source="/checkpoints/harbour-7b/step-9000",
    plan_digest="sha256:6f1c0b0d5bb1e0c3b6b3b1d5ad1ea63c3b21c16b8d6d7a0f0e1f4b0a8f3f5d11",
    results=(
        CheckResult("files", "passed", (), 4, {"files": 4, "bytes_on_disk": 14_483_464_192}, {}, 0.021),
        CheckResult("inventory", "passed", (), 291, {}, {}, 0.004),
        CheckResult("shapes", "passed", (), 291, {}, {}, 0.003),
        CheckResult("finite", "passed", (), 291, {"nonfinite_values": 0, "constant_tensors": 0}, {"nonfinite_values": 0}, 2.9),
        CheckResult("tied", "passed", (), 1, {"is_tied": False}, {}, 0.001),
        CheckResult("values", "passed", (), 291, {"tensors_differing": 0, "flushed_share": 0.0}, {"tensors_differing": 0}, 11.4),
        CheckResult(
            "statistics",
            "passed",
            (
                Finding(
                    "statistics.outlier",
                    "warning",
                    "model.layers.31.mlp.down_proj.weight",
                    "absmax near 0.12, as in the other 31 layers",
                    "absmax 0.97",
                    "Look at this layer in the training log; nothing has to be done if the model is trained to it.",
                ),
            ),
            291,
            {"largest_deviation": 7.9},
            {"largest_deviation": 8.0},
            0.06,
        ),
        CheckResult("tokenizer", "skipped", reason="no tokenizer in --assets"),
        CheckResult("config", "passed", (), 23, {}, {}, 0.002),
        CheckResult("logits", "passed", (), 512, {"cast.mean_kl": 3.1e-6, "mapping.mean_kl": 2.4e-13}, {"cast.mean_kl": 2e-5}, 21.7),
    ),
    witnesses=(
        Witness("second path", heard=True, proves=("bytes",), detail="291 tensors decoded by its own reader"),
        Witness("recorded", heard=True, proves=("mapping",), detail="golden.safetensors, computed in F32"),
        Witness("framework", heard=False, proves=("bytes", "mapping"), detail="two copies need 28.9 GiB, --witness-memory allows 8 GiB"),
        Witness("previous release", heard=False, proves=("mapping",), detail="none named"),
    ),
    environment={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0", "shardwright": "0.1.0", "host": "builder-3"},
    started="2026-11-29T16:04:11+00:00",
    finished="2026-11-29T16:05:38+00:00",
    logits=(comparison("mapping", 2.4e-13), comparison("cast", 3.1e-6)),
    tensors=tuple(layers(32)),
    phases=(
        Phase("open and plan", 1.2, 4_200_000, 0),
        Phase("write", 31.4, 28_966_928_384, 14_483_464_192),
        Phase("measure", 14.8, 14_483_464_192, 0),
        Phase("second path", 22.1, 43_450_392_576, 0),
        Phase("logits", 21.7, 14_483_464_192, 0),
        Phase("publish", 0.3, 0, 28_211),
    ),
    changes=(Change("config.json: dtype", '"float32"', '"bfloat16"', "the release was asked for in bf16"),),
    omissions=(
        Omission("optim.*", "training state", "format"),
        Omission("model.layers.*.self_attn.rotary_emb.inv_freq", "computed from the config", "rule"),
    ),
    notes=("Two equal copies of each replicated tensor were read and agreed.",),
)

_EXPORT_AGAIN = "Export again from a complete checkpoint."

RED = replace(
    GREEN,
    subject="/releases/harbour-7b/v1.5",
    results=(
        CheckResult(
            "inventory",
            "failed",
            (
                *(
                    Finding("inventory.missing", "error", f"model.layers.{n}.mlp.down_proj.weight", "4096x11008", "absent", _EXPORT_AGAIN)
                    for n in range(5)
                ),
                Finding("inventory.unexpected", "error", "model.layers.3.adapter.weight", "", "64x4096, F32", "Add a Rule or a Drop."),
            ),
            286,
        ),
        CheckResult(
            "finite",
            "failed",
            (
                Finding("finite.nan", "error", "model.layers.7.self_attn.q_proj.weight", "0 values", "3 NaN", "Export an earlier step.", 3),
                Finding("finite.constant", "warning", "model.norm.weight", "varied values", "all 1.0", "Check that the model was trained."),
            ),
            291,
            {"nonfinite_values": 3, "worst": math.nan},
            {"nonfinite_values": 0},
            2.7,
        ),
        CheckResult(
            "values",
            "failed",
            tuple(
                Finding(
                    "values.differ",
                    "error",
                    f"lm_head.weight rows {n}",
                    "crc32 9a0364b9",
                    "crc32 1c291ca3",
                    "Report this with the run folder.",
                )
                for n in range(3)
            ),
            291,
            {"tensors_differing": 1},
            {"tensors_differing": 0},
            10.9,
        ),
        CheckResult("logits", "errored", reason="the forward pass ended with MemoryError at model.layers.11"),
        CheckResult("tokenizer", "skipped", reason="no tokenizer in --assets"),
        CheckResult(
            "config",
            "failed",
            (Finding("config.field", "error", "config.json: num_key_value_heads", "8", "32", "Take the config of the training run."),),
            23,
        ),
    ),
    witnesses=tuple(replace(w, heard=w.name == "second path") for w in GREEN.witnesses),
    logits=(
        replace(
            comparison("mapping", 0.4),
            metrics={"mean_kl": math.nan, "p95_kl": math.inf, "cosine": 0.31, "top1": 0.02},
            first_diverging_layer="model.layers.7.self_attn",
            kl_by_position=tuple(math.nan if n % 16 == 3 else 0.0 if n == 0 else 0.1 * n for n in range(128)),
        ),
    ),
    tensors=tuple(
        replace(t, rms=math.nan, absmax=math.nan, nonfinite=3)
        if t.name == "model.layers.7.self_attn.q_proj.weight"
        else replace(t, rms=0.0, absmax=0.0, zero_share=1.0)
        if t.name == "model.layers.9.mlp.up_proj.weight"
        else t
        for t in GREEN.tensors
    ),
)

LONG = "model.layers.0." + "very_deeply_nested_module_with_a_name_nobody_would_choose." * 6 + "weight"

HOSTILE = replace(
    RED,
    run_id=f"run-{SCRIPT}",
    subject=f"/releases/{SCRIPT}\u202egnp.exe",
    source="/ckpt/`|\n# owned](http://evil.example)",
    results=(
        CheckResult(
            f"check-{SCRIPT}",
            "failed",
            tuple(
                Finding(
                    f"values.{n}", "error", where, f"a|b {SCRIPT}", "![x](http://evil.example/x.png)", f"<img src=x onerror=alert(1)> {n}"
                )
                for n, where in enumerate(
                    [SCRIPT, LONG, "a`b``c|d", "]]>\x00\x1b[31m\ud800", '" onmouseover="alert(1)', "nan", "{{ 7*7 }}"]
                )
            ),
            1,
            {SCRIPT: SCRIPT},
            {SCRIPT: math.inf},
        ),
        CheckResult("tokenizer", "skipped", reason=f"]]> {SCRIPT} & \x0b"),
        CheckResult("logits", "errored", reason=f"-- {SCRIPT}"),
    ),
    environment={SCRIPT: SCRIPT},
    changes=(Change(SCRIPT, SCRIPT, SCRIPT, SCRIPT),),
    omissions=(Omission(SCRIPT, SCRIPT, "rule"),),
    phases=(Phase(SCRIPT, math.nan, 1, 1),),
    notes=(SCRIPT,),
    tensors=(
        statistics(LONG, 0.1),
        statistics(LONG.replace(".0.", ".1."), 0.1),
        statistics(f"layers.0.{SCRIPT}", 1),
        statistics(f"layers.1.{SCRIPT}", 1),
    ),
    witnesses=(Witness(SCRIPT, heard=True, proves=("mapping",), detail=SCRIPT),),
)


def huge() -> Report:
    """A report on more than 10^5 tensors: a mixture of 128 experts in 264 layers."""
    return replace(GREEN, tensors=tuple(layers(264, experts=128)))
