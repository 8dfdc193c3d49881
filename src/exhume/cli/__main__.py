"""`python -m exhume.cli`."""

from exhume.cli.main import main

main()
