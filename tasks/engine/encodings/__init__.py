"""How values are stored: one file per encoding, and the ENCODINGS table."""
