"""Sweeps: a grid of independent cells, run on this machine or on a cluster.

A cell is a frozen dataclass of plain values with a method `run`. Finished cells are kept in a
folder, one file each, named by their content: a sweep that was stopped goes on where it was, and
a larger grid runs only what is new. What a cell gives depends on its fields alone, so engines,
numbers of workers and interruptions change nothing in the table. The device is not in the name,
though results on a GPU differ by rounding: a folder is for one kind of device.

`cells` has grids, `records` what comes out of them, `driver` runs them. It hands tasks (`worker`)
to an executor (`engines`), and alone writes what they return (`store`). `sources` tells which code
a result rests on.
"""

from exhume.sweep.cells import MOST, Cell, Grid
from exhume.sweep.driver import run
from exhume.sweep.records import Record, made, progress, table, write_csv

__all__ = ["MOST", "Cell", "Grid", "Record", "made", "progress", "run", "table", "write_csv"]
