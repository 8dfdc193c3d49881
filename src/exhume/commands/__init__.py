"""Commands, a file each; `exhume.cli` puts them together."""
