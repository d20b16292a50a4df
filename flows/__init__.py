"""What happens, in what order, when it stops."""
