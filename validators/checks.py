"""The checks, in the order they are reported. A check is one file and one row here; its name is its file's name."""

from validators import files, inventory, shapes
from validators.check import Check

CHECKS: tuple[Check, ...] = (
    files.CHECK,
    inventory.CHECK,
    shapes.CHECK,
)
# What headers, config and tokenizer already show: run on a release that is only planned, before the first byte is written.
CHECKS_BEFORE_WRITING: tuple[Check, ...] = (inventory.CHECK, shapes.CHECK)
