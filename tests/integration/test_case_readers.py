"""The recorded checkpoints, read: every tensor is bit-equal to the one recorded while the model was live."""

import json
import os
import zlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from reports.errors import FormatError
from tasks.engine.formats.readers import open_checkpoint
from tests.contract.assembled import assemble, same_bytes

CASES = Path(os.environ["SHARDWRIGHT_CASES"]) if "SHARDWRIGHT_CASES" in os.environ else None
PREFIXES = ("fsdp", "tp2", "accelerate", "torchtitan", "dcp_hf", "hf_", "damaged_")
NAMES = sorted(path.name for path in CASES.iterdir() if path.name.startswith(PREFIXES)) if CASES else []
needs_cases = pytest.mark.skipif(CASES is None, reason="cases: not run")

# refused cases → words of the refusal; the other one reads well and is refused by what comes after
SAYS = {
    "damaged_metadata_truncated": ".metadata: incomplete save",
    "damaged_no_metadata": "incomplete save: .metadata is missing",
    "damaged_rank3_missing": "__3_0.distcp; rank 3 lost",
    "damaged_hf_shard_first_missing": "incomplete save: .* no files of shard 1",
    "fsdp1_local_w2_llama": "FSDP1 LOCAL_STATE_DICT",
}
LATER = {"damaged_rank1_bitflip"}


def _case(name: str) -> tuple[Path, dict[str, object]]:
    assert CASES is not None
    return CASES / name, json.loads((CASES / name / "case.json").read_text())


@needs_cases
@pytest.mark.cases
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_checkpoint_is_read_bit_equal_or_refused_with_its_cause(name):
    folder, case = _case(name)
    if case["expect"] == "refuse" and name not in LATER:
        with pytest.raises(FormatError, match=SAYS.get(name, "")):
            open_checkpoint(folder / "ckpt").catalog()
        return
    reader = open_checkpoint(folder / "ckpt")
    catalog = reader.catalog()
    assert catalog.tensors
    if case["expect"] == "refuse":
        return
    truth = load_file(folder / "ref" / "expected.safetensors")
    own_names = catalog.tensors.keys() & truth.keys()
    for fqn in own_names:
        assert same_bytes(
            assemble(reader, fqn, tuple(truth[fqn].shape)), truth[fqn].to(assemble(reader, fqn, tuple(truth[fqn].shape)).dtype)
        )
    assert own_names


@needs_cases
@pytest.mark.cases
def test_the_flipped_bit_disagrees_with_the_recorded_checksum():
    folder, _ = _case("damaged_rank1_bitflip")
    reader = open_checkpoint(folder / "ckpt")
    catalog = reader.catalog()
    wrong = []
    for fqn in catalog.tensors:
        for fragment in catalog.fragments(fqn):
            payload = reader.payload(fragment)
            with Path(payload.path).open("rb") as file:
                file.seek(payload.start)
                if zlib.crc32(file.read(payload.nbytes)) != payload.crc32:
                    wrong.append((fqn, fragment.locator.path))
    assert wrong == [("model.embed_tokens.weight", "__1_0.distcp")]
