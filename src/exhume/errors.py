"""Errors that are the caller's to mend; the command line turns them into exit code 2."""


class InputError(ValueError):
    """Something handed to exhume cannot be used; the message says what, and what to do."""
