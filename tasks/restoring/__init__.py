"""Real restores: torch's own loader in processes of its own, over gloo, and the user's training step."""
