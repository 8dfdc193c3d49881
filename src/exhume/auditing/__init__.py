"""An audit: its settings, its run, its folder, and what may be said of it."""
