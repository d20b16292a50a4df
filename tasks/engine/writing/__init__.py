"""Plan in, bytes out. Decides nothing."""
