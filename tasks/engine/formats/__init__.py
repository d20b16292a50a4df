"""One file per checkpoint format, and the READERS table (tasks.engine.formats.readers)."""
