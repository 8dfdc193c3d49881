"""The command line, a file a command; `main` puts them together."""

from exhume.cli.main import main

__all__ = ["main"]
