"""What a reader gets: one offline HTML page, and a picture for a README.

`write` makes `report.html` of a run directory, `gallery_png` its picture, and `published_figures`
a few sentences on the scores of the papers.
"""

from exhume.auditing.evidence import published_figures
from exhume.report.gallery import gallery_png
from exhume.report.page import write

__all__ = ["gallery_png", "published_figures", "write"]
