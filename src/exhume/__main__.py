"""`python -m exhume`."""

from exhume.cli.main import main

main()
