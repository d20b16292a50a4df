"""Every planted fault of a GGUF file is caught by its code at the gate, and sound files of other writers pass without a word."""

from pathlib import Path

import pytest

from flows.gate import RejectedError, run_gate
from flows.requests import GateRequest
from flows.run import Outcome, PlainRunner
from reports.gguf_codes import GGUF_CODES
from tests.builders.gguf import MODELS, Content, add_tokenizer, build_model, write_release
from tests.faults.faults_in_gguf import FAULTS

gguf = pytest.importorskip("gguf")
NO_LOGITS = ["logits=not of interest here"]
TEXT = gguf.GGUFValueType.STRING
TOLD = {"gguf.no-tokenizer"}  # the files of the builder hold none


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    base = tmp_path_factory.mktemp("sources")
    wanted = {(name, False) for name in MODELS} | {("dense", True)}
    return {(name, bpe): build_model(name, base / f"{name}-{bpe}", bpe=bpe) for name, bpe in sorted(wanted)}


def _gate(folder: Path, source: Path | None) -> Outcome:
    request = GateRequest.model_validate({"release": folder, "against": source, "skip": NO_LOGITS, "runs": folder.parent / "runs"})
    try:
        return run_gate(request, PlainRunner())
    except RejectedError as red:
        return red.outcome


def _codes(outcome: Outcome) -> set[str]:
    return {found.code for result in outcome.report.results for found in result.findings}


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_fault_is_caught_by_its_code(fault, sources, tmp_path):
    source = sources[fault.base, fault.bpe]
    folder = write_release(source, tmp_path / "release", fault.kind, fault.change)
    fault.plant(folder)
    outcome = _gate(folder, source if fault.against else None)
    assert [f"{result.check}: {result.reason}" for result in outcome.report.results if result.status == "errored"] == []
    assert fault.code in _codes(outcome)
    if GGUF_CODES[fault.code].severity == "error":
        assert not outcome.verdict.green


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_sound_files_of_the_package_itself_are_accepted(name, kind, sources, tmp_path):
    source = sources[name, False]
    folder = write_release(source, tmp_path / "release", kind)
    outcome = _gate(folder, source)
    assert outcome.verdict.green
    assert _codes(outcome) <= TOLD
    values = next(result for result in outcome.report.results if result.check == "gguf_values")
    assert values.measured["differing"] == 0
    assert values.measured["compared"] > 0


@pytest.mark.parametrize("kind", ["as the converter writes it", "without the sayable", "with values that change nothing"])
def test_sound_tokenizers_and_metadata_are_accepted_without_a_word(kind, sources, tmp_path):
    def change(content: Content) -> None:
        add_tokenizer(content)
        if kind == "without the sayable":
            content.keys.pop("tokenizer.ggml.bos_token_id")  # nothing puts it anywhere
        elif kind == "with values that change nothing":
            content.keys |= {"tokenizer.ggml.pre": ("llama3", TEXT), "llama.rope.scaling.type": ("none", TEXT)}

    folder = write_release(sources["dense", True], tmp_path / "release", "Q8_0", change)
    outcome = _gate(folder, sources["dense", True])
    assert outcome.verdict.green
    assert _codes(outcome) == set()


@pytest.mark.parametrize("code", sorted(GGUF_CODES))
def test_each_code_has_a_planted_fault(code):
    assert code in {fault.code for fault in FAULTS}


def test_names_of_faults_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
