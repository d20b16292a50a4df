"""One file per model family: declarations only. A naming is a table in it; FAMILIES lists them."""
