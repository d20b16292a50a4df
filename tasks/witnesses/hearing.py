"""What it means that a witness could not be heard."""

from reports.errors import ReleaseError


class NotHeardError(ReleaseError):
    """A witness has nothing to say about this release; the message is the reason, and goes into the report."""
