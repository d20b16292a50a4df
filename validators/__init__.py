"""What must be true of a release: each check a pure function of Evidence."""
