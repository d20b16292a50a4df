"""A person's word before a release is published, as a check: nothing but a plain yes passes."""

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
        """Who, and why, in a few words."""
        return f"{self.by.strip() or 'somebody who gave no name'}: {self.reason.strip() or 'no reason given'}"


def judge_approval(answer: Answer, subject: str) -> CheckResult:
    """Return an answer as a check's result.

    Args:
        answer: what was answered.
        subject: what would be published.

    Returns:
        Passed only when the answer is `approve`.
    """
    if answer.decision == "approve":
        return CheckResult(APPROVAL, "passed", examined=1)
    if answer.decision == "reject":
        found = finding("approval.rejected", subject, expected="approve", found=f"reject, by {answer.told}")
    else:
        found = finding("approval.unanswered", subject, expected="approve", found=f"no answer in {answer.seconds:,} s")
    return CheckResult(APPROVAL, "failed", (found,), examined=1)
