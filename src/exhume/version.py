"""The version of exhume, for whoever must not import the whole package to learn it."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("exhume")
except PackageNotFoundError:  # run from the source tree
    VERSION = "0.1.0+source"
