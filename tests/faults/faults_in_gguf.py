"""Planted faults of GGUF files: what is changed before a sound file is written, or in the folder afterwards, and the code that says so."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.builders.editing import set_fields
from tests.builders.gguf import ROPE_FACTORS, Content, add_tokenizer, permute
from tests.builders.releases import build_tokenizer

_FLOAT, _TEXT, _ARRAY = gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
_Q, _K, _UP, _GATE = (f"blk.0.{role}.weight" for role in ("attn_q", "attn_k", "ffn_up", "ffn_gate"))


def _untouched(_: object) -> None:
    pass


@dataclass(frozen=True)
class GgufFault:
    """One way a GGUF file is wrong. `base` is a key of tests.builders.gguf.MODELS, `kind` how its matrices are stored.

    `change` changes what is written, `plant` the folder. `against` says whether the source is handed to the gate.
    """

    name: str
    code: str
    change: Callable[[Content], object] = _untouched
    plant: Callable[[Path], object] = _untouched
    base: str = "dense"
    kind: str = "Q8_0"
    against: bool = True
    bpe: bool = False


def _set(key: str, value: object, kind: gguf.GGUFValueType) -> Callable[[Content], object]:
    return lambda content: content.keys.update({key: (value, kind)})


def _drop_key(key: str) -> Callable[[Content], object]:
    return lambda content: content.keys.pop(key)


def _drop(name: str) -> Callable[[Content], object]:
    return lambda content: content.tensors.pop(name)


def _edit(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[Content], object]:
    return lambda content: content.tensors.update({name: (make(content.tensors[name][0]), content.tensors[name][1])})


def _exchange(content: Content) -> None:
    content.tensors[_UP], content.tensors[_GATE] = content.tensors[_GATE], content.tensors[_UP]


def _unpermute(content: Content) -> None:
    for name, heads in ((_Q, 4), (_K, 2)):
        values, kind = content.tensors[name]
        rows = values.shape[0]
        content.tensors[name] = (values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape), kind)


def _permute_as_queries(content: Content) -> None:
    # Keys permuted by the number of query heads.
    values, kind = content.tensors[_K]
    unpermuted = values.reshape(2, values.shape[0] // 4, 2, -1).swapaxes(1, 2).reshape(values.shape)
    content.tensors[_K] = (permute(unpermuted, 4), kind)


def _scales(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], object]:
    # Of every block of one tensor, its two bytes of scale.
    def plant(folder: Path) -> None:
        (path,) = folder.glob("*.gguf")
        tensor = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == _UP)
        blocks = tensor.data.reshape(-1, 34)
        blocks[:, :2] = change(blocks[:, :2].copy())

    return plant


def _cut(nbytes: int) -> Callable[[Path], object]:
    def plant(folder: Path) -> None:
        (path,) = folder.glob("*.gguf")
        os.truncate(path, path.stat().st_size - nbytes)

    return plant


def _append(folder: Path) -> None:
    (path,) = folder.glob("*.gguf")
    with path.open("ab") as file:
        file.write(bytes(64))


def _offset_off(folder: Path) -> None:
    # The second tensor's offset, moved by eight bytes.
    (path,) = folder.glob("*.gguf")
    reader = gguf.GGUFReader(path, "r+")
    reader.tensors[1].field.parts[-1][0] += 8


def _scale_rope(content: Content) -> None:
    content.tensors[ROPE_FACTORS] = (np.linspace(1, 8, 16, dtype=np.float32), gguf.GGMLQuantizationType.F32)


def _store_norm_as_f16(content: Content) -> None:
    name = "output_norm.weight"
    content.tensors[name] = (content.tensors[name][0], gguf.GGMLQuantizationType.F16)


def _store_norm_in_blocks(content: Content) -> None:
    content.tensors["output_norm.weight"] = (content.tensors["output_norm.weight"][0], gguf.GGMLQuantizationType.Q8_0)


def _store_as_q4_0(content: Content) -> None:
    content.tensors[_UP] = (content.tensors[_UP][0], gguf.GGMLQuantizationType.Q4_0)


def _name_twice(folder: Path) -> None:
    # blk.1.ffn_up gets the name of blk.0.ffn_up.
    (path,) = folder.glob("*.gguf")
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    tensor.field.parts[1][:] = np.frombuffer(_UP.encode(), np.uint8)


def _told(key: str, make: Callable[[object], object]) -> Callable[[Content], object]:
    # A sound tokenizer, of which one key is changed; None drops it.
    def change(content: Content) -> None:
        add_tokenizer(content)
        name = f"tokenizer.ggml.{key}"
        value, kind = content.keys.pop(name)
        made = make(value)
        content.keys |= {} if made is None else {name: (made, kind)}

    return change


def _exchanged(at: int) -> Callable[[list], list]:
    return lambda items: [*items[:at], items[at + 1], items[at], *items[at + 2 :]]


def _write_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def _make_words(folder: Path) -> None:
    # The tokenizer beside the file is one of words.
    build_tokenizer().save_pretrained(folder)


FAULTS: tuple[GgufFault, ...] = (
    GgufFault(
        "gguf_of_another_architecture",
        "gguf.architecture",
        plant=lambda f: set_fields(f / "config.json", model_type="qwen2"),
        against=False,
    ),
    GgufFault("gguf_wrong_rope_base", "gguf.metadata", _set("llama.rope.freq_base", 10000.0, _FLOAT)),
    GgufFault("gguf_wrong_eps", "gguf.metadata", _set("llama.attention.layer_norm_rms_epsilon", 1e-6, _FLOAT)),
    GgufFault("gguf_scaled_rope", "gguf.metadata", _set("llama.rope.scaling.type", "linear", _TEXT), against=False),
    GgufFault("gguf_rope_factors_lost", "gguf.missing", _drop(ROPE_FACTORS), base="scaled", against=False),
    GgufFault("gguf_rope_factors_inverted", "gguf_values.differing", _edit(ROPE_FACTORS, lambda factors: 1 / factors), base="scaled"),
    GgufFault("gguf_rope_factors_of_an_unscaled_config", "gguf.unexpected", _scale_rope, against=False),
    GgufFault("gguf_without_rope_base", "gguf.metadata-missing", _drop_key("llama.rope.freq_base")),
    GgufFault("gguf_without_head_size", "gguf.metadata-missing", _drop_key("llama.attention.key_length"), base="wide", against=False),
    GgufFault("gguf_tensor_lost", "gguf.missing", _drop("blk.1.ffn_down.weight")),
    GgufFault("gguf_head_lost", "gguf.head-missing", _drop("output.weight")),
    GgufFault("gguf_embedding_of_tied_lost", "gguf.missing", _drop("token_embd.weight"), base="tied"),
    GgufFault(
        "gguf_under_published_name", "gguf.unexpected", lambda c: c.tensors.update({"model.norm.weight": c.tensors["output_norm.weight"]})
    ),
    GgufFault("gguf_name_twice", "gguf.twice", plant=_name_twice, against=False),
    GgufFault("gguf_transposed", "gguf.shape", _edit(_UP, lambda values: np.ascontiguousarray(values.T))),
    GgufFault("gguf_norm_in_f16", "gguf.type", _store_norm_as_f16),
    GgufFault("gguf_norm_in_blocks", "gguf.type", _store_norm_in_blocks),
    GgufFault("gguf_part_of_a_model", "gguf.not-judged", _set("split.count", 3, gguf.GGUFValueType.UINT16), against=False),
    GgufFault("gguf_of_architecture_not_judged", "gguf.not-judged", lambda c: setattr(c, "architecture", "clip"), against=False),
    GgufFault("gguf_type_of_another_file", "gguf.file-type", _set("general.file_type", 1, gguf.GGUFValueType.UINT32)),
    GgufFault("gguf_cut", "gguf.layout", plant=_cut(4096)),
    GgufFault("gguf_goes_on", "gguf.layout", plant=_append),
    GgufFault("gguf_off_alignment", "gguf.layout", plant=_offset_off, against=False),
    GgufFault(
        "gguf_other_tokens",
        "gguf.tokenizer",
        _told("tokens", lambda tokens: [f"t{i}" for i in range(len(tokens))]),
        bpe=True,
        against=False,
    ),
    GgufFault("gguf_tokens_exchanged", "gguf.tokenizer", _told("tokens", _exchanged(20)), bpe=True, against=False),
    GgufFault("gguf_tokens_cut", "gguf.tokenizer", _told("tokens", lambda tokens: tokens[:280]), bpe=True, against=False),
    GgufFault("gguf_another_kind_of_tokenizer", "gguf.tokenizer", _told("model", lambda _: "llama"), bpe=True, against=False),
    GgufFault("gguf_merges_exchanged", "gguf.merges", _told("merges", _exchanged(0)), bpe=True, against=False),
    GgufFault("gguf_merges_lost", "gguf.merges", _told("merges", lambda _: None), bpe=True, against=False),
    GgufFault(
        "gguf_special_tokens_as_ordinary", "gguf.token-type", _told("token_type", lambda types: [1] * len(types)), bpe=True, against=False
    ),
    GgufFault(
        "gguf_ordinary_tokens_as_special", "gguf.token-type", _told("token_type", lambda types: [3] * len(types)), bpe=True, against=False
    ),
    GgufFault("gguf_types_of_half_the_tokens", "gguf.token-type", _told("token_type", lambda types: types[:160]), bpe=True, against=False),
    GgufFault("gguf_cut_by_another_name", "gguf.cut", _told("pre", lambda _: "qwen2"), bpe=True, against=False),
    GgufFault("gguf_cut_by_no_name", "gguf.cut", _told("pre", lambda _: None), bpe=True, against=False),
    GgufFault("gguf_stops_at_another_id", "gguf.special-id", _told("eos_token_id", lambda _: 7), bpe=True, against=False),
    GgufFault("gguf_says_no_id_to_stop_at", "gguf.special-id", _told("eos_token_id", lambda _: None), bpe=True, against=False),
    GgufFault("gguf_begins_with_another_id", "gguf.special-id", _told("bos_token_id", lambda _: 7), bpe=True, against=False),
    GgufFault("gguf_begins_unless_told", "gguf.around", _told("add_bos_token", lambda _: None), bpe=True, against=False),
    GgufFault("gguf_begins_though_the_tokenizer_does_not", "gguf.around", _told("add_bos_token", lambda _: True), bpe=True, against=False),
    GgufFault("gguf_without_the_chat_template", "gguf.chat-template", add_tokenizer, _write_template, bpe=True, against=False),
    GgufFault("gguf_merges_beside_words", "gguf.tokenizer", add_tokenizer, _make_words, bpe=True, against=False),
    GgufFault("gguf_sees_the_future", "gguf.metadata", _set("llama.attention.causal", False, gguf.GGUFValueType.BOOL), against=False),
    GgufFault("gguf_of_experts", "gguf.metadata", _set("llama.expert_count", 4, gguf.GGUFValueType.UINT32), against=False),
    GgufFault("gguf_without_tokenizer", "gguf.no-tokenizer"),
    GgufFault("gguf_of_types_not_judged", "gguf.not-judged", _store_as_q4_0, against=False),
    GgufFault("gguf_without_config", "gguf.not-judged", plant=lambda f: (f / "config.json").unlink(), against=False),
    GgufFault("gguf_unpermuted", "gguf_values.unpermuted", _unpermute),
    GgufFault("gguf_keys_permuted_as_queries", "gguf_values.differing", _permute_as_queries, kind="F16"),
    GgufFault("gguf_names_exchanged", "gguf_values.exchanged", _exchange),
    GgufFault("gguf_scale_bytes_swapped", "gguf_values.error", plant=_scales(lambda scales: scales[:, ::-1])),
    GgufFault("gguf_scales_of_the_wrong_half", "gguf_values.error", plant=_scales(lambda scales: np.roll(scales, len(scales) // 2, 0))),
    GgufFault("gguf_scale_off_by_a_bit", "gguf_values.differing", plant=_scales(lambda scales: scales ^ np.array([1, 0], np.uint8))),
    GgufFault("gguf_value_changed", "gguf_values.differing", _edit(_UP, lambda values: values + 1e-3), kind="F16"),
    GgufFault("gguf_not_compared", "gguf_values.not-compared", _store_as_q4_0),
)
