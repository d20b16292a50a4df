"""Metadata in, plan out. Reads no tensor byte and does no I/O."""
