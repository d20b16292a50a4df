"""Reading, mapping, planning and writing checkpoints. Pure: no Prefect, no transformers, no clock, no environment."""
