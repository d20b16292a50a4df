"""Which saves of a run are kept: policy and facts in, a decision per save out. Pure; no torch."""
