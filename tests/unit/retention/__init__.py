"""Retention, the ledger and save advice, piece by piece."""
