"""What a reader gets: one offline HTML page, and a picture for a README.

`write` makes `report.html` of a run directory, `gallery_png` its picture.
"""

from exhume.report.gallery import gallery_png
from exhume.report.page import write

__all__ = ["gallery_png", "write"]
