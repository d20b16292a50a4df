"""The checks, in the order they are reported. A check is one file and one row here; its name is its file's name."""

from validators import (
    config,
    duplicates,
    experts,
    files,
    finite,
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
    values,
)
from validators.check import Check

CHECKS: tuple[Check, ...] = (
    files.CHECK,
    manifest.CHECK,
    secrets.CHECK,
    inventory.CHECK,
    shapes.CHECK,
    config.CHECK,
    quantized.CHECK,
    tokenizer.CHECK,
    tied.CHECK,
    experts.CHECK,
    finite.CHECK,
    duplicates.CHECK,
    rows.CHECK,
    outliers.CHECK,
    statistics.CHECK,
    values.CHECK,
    logits.CHECK,
)
# An export's own: the owner's rules are asked at the gate, and running them takes seconds and 200 MiB.
CHECKS_OF_EXPORT: tuple[Check, ...] = tuple(check for check in CHECKS if check is not statistics.CHECK)
# What headers, config, plan and tokenizer already show: run on a release that is only planned, before the first byte is written.
CHECKS_BEFORE_WRITING: tuple[Check, ...] = (inventory.CHECK, shapes.CHECK, config.CHECK, tokenizer.CHECK, tied.CHECK, experts.CHECK)
