"""What a checkpoint shows against its release, as a check's result: of a refused source, whose export or gate ends there."""

from dataclasses import replace

from reports.codes import finding
from reports.errors import ReleaseError
from reports.model import CheckResult

SOURCE = "source"


def judge_refusal(refused: ReleaseError) -> CheckResult:
    """Return a refusal as a failed check.

    Args:
        refused: has a code.

    Returns:
        One finding.

    Raises:
        KeyError: no such code.
    """
    said = finding(refused.code, refused.where, found=refused.what)
    return CheckResult(SOURCE, "failed", (replace(said, remedy=refused.remedy or said.remedy),), examined=1)
