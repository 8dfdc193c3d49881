"""A user's model becomes a Problem."""
