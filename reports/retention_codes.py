"""The finding codes of retention and of the ledger, part of the table in reports.codes."""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code

_RETENTION: dict[str, Code] = {
    "retention.unverified": Code("nothing may go: fewer than two saves are verified", "Drill the run first.", "warning"),
    "retention.incomplete": Code("a save that is not complete is not acted on", "Look whether it is being written.", "warning"),
    "retention.backward": Code(
        "saves were written before one of an earlier step: training went back",
        "Move the saves that it left behind out of the root, or pin what must stay: rules count by step.",
        "warning",
    ),
    "retention.unlogged": Code(
        "spikes and switches of data are not looked for beside saves that no log tells of",
        "Give a --log that has the loss of these steps, or set pin_spikes and pin_data_switches to false.",
        "warning",
    ),
    "retention.unplaced": Code("results that tell of no step hold no save", "Write the step into the file.", "warning"),
    "retention.over-budget": Code("what is kept is more than the budget", "Keep less, or raise budget_nbytes.", "warning"),
    "retention.not-thinned": Code(
        "weights only were wanted of a save whose files hold the rest too",
        "Export its weights, and drop the rule.",
        "warning",
    ),
    "retention.left": Code("a save that should have gone is still there", "Look at the message, and run it again."),
}

_LEDGER: dict[str, Code] = {
    "ledger.log-gap": Code("the log leaves steps out", "Find the log of the restart that made them.", "warning"),
    "ledger.tokens-fall": Code("the log's consumed tokens do not grow with its steps", "Look where a restart lost its counter."),
    "ledger.step-differs": Code("a save's own counter tells another step than its folder", "Rename it, if it was copied."),
    "ledger.tokens-differ": Code("records of one step tell different consumed tokens", "Find out which counter was reset or doubled."),
    "ledger.data-differs": Code("records of one step tell different versions of the data", "Find out which data it was trained on."),
    "ledger.not-logged": Code("a step of which something exists is not in the log", "Find the log of that stretch.", "warning"),
    "ledger.save-gone": Code("something was made of a save that is no longer there", "Pin saves that results rest on.", "warning"),
    "ledger.unplaced": Code("results that tell of no step", "Write the step into the file.", "warning"),
}

RETENTION_CODES: Mapping[str, Code] = MappingProxyType(_RETENTION | _LEDGER)
