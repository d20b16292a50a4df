"""Results as plain data, and their renderings. Imports no torch, numpy, pandas or Prefect."""
