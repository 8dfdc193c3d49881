"""Cells: frozen dataclasses of plain values, each of which one experiment is run on.

A cell imports nothing that draws, judges or prints, so that a change there leaves the address of
its stored result as it is.
"""
