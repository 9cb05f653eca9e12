"""What can be plugged in: the hooks, who answers them, and the built-in parts, which come through the same door."""
