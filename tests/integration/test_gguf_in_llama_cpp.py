"""GGUF files of exports in llama.cpp itself: the same logits and the same ids as transformers has them from the source."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken, processors

from flows.export import run_export
from flows.requests import ExportRequest
from flows.run import PlainRunner, Silent
from tests.builders.gguf import LLAMA_CUT, MODELS, build_bpe, build_model
from tests.builders.llama_cpp import REASON, open_engine

pytest.importorskip("gguf")
pytest.importorskip("llama_cpp.llama_cpp", reason=REASON)
pytestmark = pytest.mark.slow

LIMITS = {"f16": 1e-4, "bf16": 1e-3, "q8_0": 1e-2}  # mean KL in nats; llama.cpp rounds activations to eight bits too where weights are Q8_0
TEXTS = [
    "the shards of 12345 weights",
    "  two  blanks\n\n x\t",
    "naïve 中文 \U0001f680",
    "<s>reading</s> <tool>writing</tool> <|fim|>",
    "I've",
]


def _export(source: Path, base: Path, kind: str) -> Path:
    asked = {"source": source, "to": base / "release", "gguf": kind, "runs": base / "runs", "fsync": False}
    assert run_export(ExportRequest.model_validate(asked), PlainRunner(), Silent()).verdict.green
    (path,) = (base / "release").glob("*.gguf")
    return path


@pytest.mark.parametrize("kind", sorted(LIMITS))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_logits_are_those_of_the_source(name, kind, tmp_path):
    source = build_model(name, tmp_path / "source", bpe=name == "dense")
    ids = torch.arange(6, 60)
    with torch.inference_mode():
        wanted = transformers.AutoModelForCausalLM.from_pretrained(source)(input_ids=ids[None]).logits[0].log_softmax(-1)
    with open_engine(_export(source, tmp_path, kind)) as engine:
        found = engine.logits(ids.tolist()).log_softmax(-1)
    assert float((wanted.exp() * (wanted - found)).sum(-1).mean()) <= LIMITS[kind]


@pytest.mark.parametrize("template", ["$A", "<s> $A", "<s> $A </s>", "$A </s>"])
@pytest.mark.parametrize("cut", [(LLAMA_CUT, True), (LLAMA_CUT.replace("{1,3}", ""), False)], ids=["llama", "qwen"])
def test_texts_become_the_ids_that_transformers_gives(cut, template, tmp_path):
    source = build_model("dense", tmp_path / "source")
    tokenizer = build_bpe(cut=cut[0], ignore_merges=cut[1])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, special=False), AddedToken("<|fim|>", normalized=False, special=False)])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.save_pretrained(source)
    with open_engine(_export(source, tmp_path, "f16")) as engine:
        assert {text: engine.encode(text) for text in TEXTS} == {text: tokenizer(text)["input_ids"] for text in TEXTS}
        assert engine.special() == (1, 2)
