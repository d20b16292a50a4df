"""A person's word before a release is published, as a check: nothing but a plain yes passes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reports.codes import finding
from reports.model import CheckResult

APPROVAL = "approval"


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered: `decision`, who answered and why, as they wrote it; `unanswered` when nobody did in `seconds`."""

    decision: Literal["approve", "reject", "unanswered"]
    by: str = ""
    reason: str = ""
    seconds: int = 0

    @property
    def told(self) -> str:
        """Who, and why, in a few words; how long was waited in vain."""
        if self.decision == "unanswered":
            return f"no answer in {self.seconds:,} s"
        return f"{self.by.strip() or 'somebody who gave no name'}: {self.reason.strip() or 'no reason given'}"


def judge_approval(answer: Answer, subject: str, checked: Mapping[str, str], found: Mapping[str, str]) -> CheckResult:
    """Return an answer as a check's result. A yes is to what was checked: a question may stand for a day.

    Args:
        answer: what was answered.
        subject: what would be published.
        checked: sha256 by file name, of what was checked before somebody was asked.
        found: the same of what lies there after a yes; of no account otherwise.

    Returns:
        Passed only when the answer is `approve`, and nothing was changed, added or lost while it was awaited.
    """
    if answer.decision == "approve":
        changed = tuple(
            finding("approval.changed", name, expected=f"sha256 {checked.get(name, 'none')}", found=f"sha256 {found.get(name, 'none')}")
            for name in sorted({*checked, *found})
            if checked.get(name) != found.get(name)
        )
        return CheckResult(APPROVAL, "failed" if changed else "passed", changed, examined=1 + len(checked))
    if answer.decision == "reject":
        said = finding("approval.rejected", subject, expected="approve", found=f"reject, by {answer.told}")
    else:
        said = finding("approval.unanswered", subject, expected="approve", found=answer.told)
    return CheckResult(APPROVAL, "failed", (said,), examined=1)
