"""Sweeps: a grid of independent cells, run on this machine or on a cluster.

A cell is a frozen dataclass of plain values with a method `run`, and what it gives depends on its
fields alone. Finished cells are kept in a folder, one file each: a sweep that was stopped goes on
where it was. The device is not in the name of the file: a folder is for one kind of device.
"""

from exhume.sweep.driver import run
from exhume.sweep.grid import MOST, Cell, Grid, Record, made, progress, table, write_csv

__all__ = ["MOST", "Cell", "Grid", "Record", "made", "progress", "run", "table", "write_csv"]
