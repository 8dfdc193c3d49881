"""Search: what to try next when one start is not enough. Nothing here sees the truth."""
