"""Codes of what a release is held against beside its source: a reference's config and tokenizer, an earlier release's weights."""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code

_REFERENCE = "Use the reference's, or name the reference this model was trained with (--assets)."
_MEANT = "Look whether the change was meant."

_CONFIG_DRIFT: dict[str, Code] = {
    "config_drift.absent": Code("no config, where the reference has one", _REFERENCE),
    "config_drift.architecture": Code("another architecture than the reference's", _REFERENCE),
    "config_drift.dims": Code("a number that sizes the model is not the reference's", _REFERENCE),
    "config_drift.rope": Code("positions are rotated otherwise than in the reference", _REFERENCE),
    "config_drift.eps": Code("the norms' epsilon is not the reference's", _REFERENCE),
    "config_drift.positions": Code("positions or attention windows are limited otherwise than in the reference", _REFERENCE),
    "config_drift.routing": Code("tokens are routed to experts otherwise than in the reference", _REFERENCE),
    "config_drift.forward": Code("an activation, bias or scale of the forward pass is not the reference's", _REFERENCE),
    "config_drift.special-ids": Code("a special id is not the reference's", _REFERENCE),
    "config_drift.padding": Code("the padding id is not the reference's", _MEANT, "warning"),
    "config_drift.stop-ids": Code("generation begins or ends on other ids than the reference's", _REFERENCE),
    "config_drift.generation": Code("a generation default is not the reference's", _MEANT, "warning"),
    "config_drift.field": Code("another field is not the reference's", _MEANT, "warning"),
}

_TOKENIZER_DRIFT: dict[str, Code] = {
    "tokenizer_drift.absent": Code("no tokenizer, where the reference has one", _REFERENCE),
    "tokenizer_drift.unreadable": Code("the release's tokenizer or the reference's does not load", _REFERENCE),
    "tokenizer_drift.ids": Code("tokens have other ids than in the reference", _REFERENCE),
    "tokenizer_drift.lost": Code("tokens of the reference are absent", _REFERENCE),
    "tokenizer_drift.added": Code("tokens that the reference has not", _MEANT, "warning"),
    "tokenizer_drift.special": Code("a special token is not the reference's", _REFERENCE),
    "tokenizer_drift.padding": Code("the padding token is not the reference's", _MEANT, "warning"),
    "tokenizer_drift.encoding": Code("a text becomes other ids than with the reference", _REFERENCE),
    "tokenizer_drift.decoding": Code("ids are read as another text than with the reference", _REFERENCE),
    "tokenizer_drift.setting": Code("another setting than the reference's", _MEANT, "warning"),
    "tokenizer_drift.chat-template": Code("a conversation is written otherwise than with the reference", _REFERENCE),
}

_WEIGHTS_DRIFT: dict[str, Code] = {
    "weights_drift.lost": Code("tensors of the earlier release are absent", "Export again from a complete checkpoint."),
    "weights_drift.added": Code("tensors that the earlier release has not", "Check the config's layer and expert counts."),
    "weights_drift.shape": Code("a tensor has another shape than in the earlier release", _REFERENCE),
    "weights_drift.vocabulary": Code("embedding or head has other rows than in the earlier release", _MEANT, "warning"),
    "weights_drift.rms": Code(
        "a matrix grew or shrank by a factor, its siblings did not",
        "Look at this tensor in the checkpoint: it may never have been loaded or trained.",
    ),
    "weights_drift.rms-of-role": Code("matrices of a role grew or shrank by a factor", _MEANT, "warning"),
    "weights_drift.unchanged": Code("matrices are those of the earlier release", "Look whether they were frozen.", "warning"),
}

CODES_OF_DRIFT: Mapping[str, Code] = MappingProxyType(_CONFIG_DRIFT | _TOKENIZER_DRIFT | _WEIGHTS_DRIFT)
