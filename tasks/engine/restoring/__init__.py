"""What a drill reads: every tensor, every object, and the digests recorded of them."""
