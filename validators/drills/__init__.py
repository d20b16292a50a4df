"""What must be true of a checkpoint that training can come back from: each check a pure function of what a drill saw."""
