"""Hypothesis without a deadline: a busy machine is no fault."""

from hypothesis import settings

settings.register_profile("property", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("property")
