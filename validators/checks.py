"""The checks, in the order they are reported. A check is one file and one row here; its name is its file's name."""

from collections.abc import Iterable

from validators import (
    config,
    config_drift,
    duplicates,
    experts,
    files,
    finite,
    gguf,
    gguf_values,
    inventory,
    logits,
    manifest,
    outliers,
    quantized,
    rows,
    secrets,
    shapes,
    statistics,
    tied,
    tokenizer,
    tokenizer_drift,
    values,
    weights_drift,
)
from validators.check import Check
from validators.release import Release

CHECKS: tuple[Check, ...] = (
    files.CHECK,
    manifest.CHECK,
    secrets.CHECK,
    inventory.CHECK,
    shapes.CHECK,
    config.CHECK,
    quantized.CHECK,
    tokenizer.CHECK,
    config_drift.CHECK,
    tokenizer_drift.CHECK,
    tied.CHECK,
    experts.CHECK,
    finite.CHECK,
    duplicates.CHECK,
    rows.CHECK,
    outliers.CHECK,
    weights_drift.CHECK,
    statistics.CHECK,
    values.CHECK,
    logits.CHECK,
)
# Of a release that is one GGUF file: what holds its bytes, its header and its values. Config and tokenizer are those planned with.
CHECKS_OF_GGUF: tuple[Check, ...] = (
    files.CHECK,
    manifest.CHECK,
    secrets.CHECK,
    gguf.CHECK,
    tokenizer.CHECK,
    finite.CHECK,
    gguf_values.CHECK,
    values.CHECK,
    logits.CHECK,
)
# All that a finished folder, of whatever kind, may be judged by: the names that --skip and a policy know.
NAMED: tuple[Check, ...] = (*CHECKS, *(check for check in CHECKS_OF_GGUF if check not in CHECKS))
# Asked at the gate only: the owner's rules, which take seconds and 200 MiB, and what needs a reference beside the source.
CHECKS_OF_GATE = frozenset({"statistics", "config_drift", "tokenizer_drift", "weights_drift"})
CHECKS_OF_EXPORT: tuple[Check, ...] = tuple(check for check in CHECKS if check.name not in CHECKS_OF_GATE)
NAMED_AT_EXPORT: tuple[Check, ...] = tuple(check for check in NAMED if check.name not in CHECKS_OF_GATE)
# What headers, config, plan and tokenizer already show: run on a release that is only planned, before the first byte is written.
CHECKS_BEFORE_WRITING: tuple[Check, ...] = (
    inventory.CHECK,
    shapes.CHECK,
    config.CHECK,
    quantized.CHECK,
    tokenizer.CHECK,
    tied.CHECK,
    experts.CHECK,
)
# What a finished folder shows before a tensor is read.
_OF_BYTES = frozenset({"manifest", "bytes", "values", "gguf_values", "plan", "logits", "earlier"})


def checks_of(release: Release) -> tuple[Check, ...]:
    """Return the checks that judge a finished folder.

    Args:
        release: its headers.

    Returns:
        CHECKS; for a GGUF file CHECKS_OF_GGUF and what a reference shows; of one beside safetensors the header is judged as well.
    """
    if release.is_gguf:
        return (*CHECKS_OF_GGUF, config_drift.CHECK, tokenizer_drift.CHECK)
    return (*CHECKS, gguf.CHECK) if release.ggufs else CHECKS


def of_headers(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the checks that a folder can be judged by before a tensor is read.

    Args:
        checks: any.

    Returns:
        Those of them, in the same order.
    """
    return tuple(check for check in checks if _OF_BYTES.isdisjoint(check.needs))
