"""The words the engine is written in: regions, fragments, catalogs, rules."""
