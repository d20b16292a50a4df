"""Finite, tied and values on hand-made tables: when a statistic stands out, and how an exchange is named."""

from dataclasses import replace

import pandas as pd

from tests.builders.headers import codes_of, planned_release
from validators import finite, tied, values
from validators.expectation import Evidence, Expectation

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PAIR = Expectation("llama", {EMBEDDING: (4, 2), HEAD: (4, 2)}, is_tied=False, tied=((EMBEDDING, HEAD),), embedding=EMBEDDING, head=HEAD)


def tensor(name, **fields):
    """Return a TensorTable row of an ordinary (4, 2) tensor."""
    ordinary = {
        "absmax": 2.0,
        "rms": 1.0,
        "mean": 0.1,
        "nonfinite": 0,
        "zero_share": 0.0,
        "constant": 0,
        "parity": "0",
        "sample": "",
        "relative_error": float("nan"),
    }
    return {"name": name, "file": "m", "dtype": "F32", "shape": "4x2", "nbytes": 32} | ordinary | fields


def value(name, **fields):
    """Return a ValueTable row of a tensor that equals its source."""
    equal = {"numel": 8, "differing": 0, "max_abs": 0.0, "first": -1, "expected_crc32": -1, "found_crc32": -1, "flushed": 0}
    return {"name": name, "witness": "second path"} | equal | fields


def evidence(tensors=(), compared=(), expected=None, config=None):
    """Return evidence of a planned release of (4, 2) tensors with the given rows."""
    release = planned_release({row["name"]: (4, 2) for row in tensors or compared}, config=config or {})
    tables = (pd.DataFrame(list(rows)) if rows else None for rows in (tensors, compared))
    return Evidence(release, expected, None, *tables)


def layers(part, *rows):
    """Return TensorTable rows of the same part in consecutive layers."""
    return [tensor(f"model.layers.{i}.{part}", **fields) for i, fields in enumerate(rows)]


ZERO = {"absmax": 0.0, "rms": 0.0, "mean": 0.0, "zero_share": 1.0, "constant": 1}
ONES = {"absmax": 1.0, "rms": 1.0, "mean": 1.0, "constant": 1}


def test_all_zero_matrix_in_every_layer_is_excused_only_by_an_exact_source():
    rows = layers("mlp.up_proj.weight", ZERO, ZERO)
    assert codes_of(finite.examine(evidence(rows))) == ["finite.all-zero"] * 2
    proven = [value(row["name"]) for row in rows]
    assert codes_of(finite.examine(evidence(rows, proven))) == ["finite.source-zero"] * 2
    assert codes_of(finite.examine(evidence(layers("mlp.up_proj.weight", ZERO, {}), proven))) == ["finite.all-zero"]


def test_scalar_of_zero_is_normal_unless_other_layers_differ():
    scalar = ZERO | {"shape": "1", "constant": 0}
    assert codes_of(finite.examine(evidence(layers("attn.gate", scalar, scalar)))) == []
    assert codes_of(finite.examine(evidence(layers("attn.gate", scalar, {"shape": "1"})))) == ["finite.zero-bias"]


def test_zero_biases_are_a_warning_only_where_they_stand_out():
    assert codes_of(finite.examine(evidence(layers("q_proj.bias", ZERO, ZERO)))) == []
    assert codes_of(finite.examine(evidence(layers("q_proj.bias", ZERO, {})))) == ["finite.zero-bias"]


def test_ones_in_one_norm_stand_out_and_in_every_norm_do_not():
    assert codes_of(finite.examine(evidence(layers("input_layernorm.weight", ONES, ONES)))) == []
    assert codes_of(finite.examine(evidence(layers("input_layernorm.weight", ONES, {})))) == ["finite.constant-outlier"]


def test_single_norm_of_ones_is_sound_and_of_twos_is_a_warning():
    assert codes_of(finite.examine(evidence([tensor("model.norm.weight", **ONES)]))) == []
    twos = {"absmax": 2.0, "rms": 2.0, "mean": 2.0, "constant": 1}
    assert codes_of(finite.examine(evidence([tensor("model.norm.weight", **twos)]))) == ["finite.constant"]


def test_nan_statistics_of_a_tensor_without_finite_values_do_not_crash():
    nothing = dict.fromkeys(["absmax", "rms", "mean"], float("nan")) | {"nonfinite": 8}
    outcome = finite.examine(evidence([tensor("model.norm.weight", **nothing)]))
    assert codes_of(outcome) == ["finite.nonfinite"]
    assert outcome.findings[0].found == "8 of 8 are NaN or infinite"


def test_untied_head_equal_to_the_embedding_is_excused_only_by_an_exact_source():
    rows = [tensor(EMBEDDING), tensor(HEAD)]
    flag = {"tie_word_embeddings": False}
    assert codes_of(tied.examine(evidence(rows, (), PAIR, flag))) == ["tied.head-is-embedding"]
    proven = [value(EMBEDDING), value(HEAD)]
    assert codes_of(tied.examine(evidence(rows, proven, PAIR, flag))) == ["tied.source-head-is-embedding"]
    wrong = [value(EMBEDDING), value(HEAD, differing=8)]
    assert codes_of(tied.examine(evidence(rows, wrong, PAIR, flag))) == ["tied.head-is-embedding"]


def test_flag_absent_means_what_the_family_says():
    rows = [tensor(EMBEDDING), tensor(HEAD, parity="7")]
    assert codes_of(tied.examine(evidence(rows, (), replace(PAIR, is_tied=True)))) == ["tied.head-differs"]
    assert codes_of(tied.examine(evidence(rows, (), PAIR))) == []


def test_exchange_is_named_both_ways_and_damage_is_not_called_one():
    rows = [
        value("a", differing=8, expected_crc32=1, found_crc32=2),
        value("b", differing=8, expected_crc32=2, found_crc32=1),
        value("c", differing=1, expected_crc32=3, found_crc32=4, first=5, max_abs=0.5),
    ]
    outcome = values.examine(evidence(compared=rows))
    assert [(found.code, found.where, found.found) for found in outcome.findings] == [
        ("values.exchanged", "a", "those of b"),
        ("values.exchanged", "b", "those of a"),
        ("values.differing", "c", "1 of 8 differ, by at most 0.5, first at 5"),
    ]


def test_one_flushed_element_of_a_small_tensor_is_allowed_and_two_are_not():
    assert codes_of(values.examine(evidence(compared=[value("a", flushed=1)]))) == []
    assert codes_of(values.examine(evidence(compared=[value("a", flushed=2)]))) == ["values.flushed"]


def test_tensor_no_witness_spoke_of_is_found():
    release = planned_release({"a": (4, 2), "b": (4, 2)})
    outcome = values.examine(Evidence(release, values=pd.DataFrame([value("a")])))
    assert [(found.code, found.where) for found in outcome.findings] == [("values.not-compared", "b")]
    assert outcome.examined == 1


def test_a_tensor_of_another_dtype_or_shape_than_planned_says_which_instead_of_how_far():
    plan = pd.DataFrame({"name": ["a", "b"], "dtype": ["BF16", "F32"], "shape": ["4x2", "2x4"]})
    rows = [value(name, differing=8, first=0, max_abs=float("nan")) for name in "ab"]
    stored = planned_release({"a": (4, 2), "b": (4, 2)})  # F32
    outcome = values.examine(Evidence(stored, plan=plan, values=pd.DataFrame(rows)))
    assert [(found.code, found.found) for found in outcome.findings] == [
        ("values.differing", "stored as F32 (4, 2), planned BF16 (4, 2)"),
        ("values.differing", "stored as F32 (4, 2), planned F32 (2, 4)"),
    ]


def test_a_nan_among_values_that_were_compared_is_given_no_distance():
    outcome = values.examine(evidence(compared=[value("a", differing=2, first=3, max_abs=float("nan"))]))
    assert [found.found for found in outcome.findings] == ["2 of 8 differ, first at 3"]
