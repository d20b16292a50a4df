"""The finding codes of retention and of the ledger, part of the table in reports.codes."""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code

_RETENTION: dict[str, Code] = {
    "retention.unverified": Code("nothing may go: fewer than two saves are verified", "Drill the run first.", "warning"),
    "retention.incomplete": Code("a save that is not complete is not acted on", "Look whether it is being written.", "warning"),
    "retention.over-budget": Code("what is kept is more than the budget", "Keep less, or raise budget_nbytes.", "warning"),
    "retention.not-thinned": Code(
        "weights only were wanted of a save whose files hold the rest too",
        "Export its weights, and drop the rule.",
        "warning",
    ),
    "retention.left": Code("a save that should have gone is still there", "Look at the message, and run it again."),
}

RETENTION_CODES: Mapping[str, Code] = MappingProxyType(_RETENTION)
