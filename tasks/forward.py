"""Folder or live state → model → logits."""
