"""What a reader gets: one offline HTML page, and a picture for a README.

Inside: `write` makes `report.html` of a run directory, `gallery_png` its picture,
`published_figures` a few sentences on the scores of the papers.
"""

from exhume.report._gallery import gallery_png
from exhume.report.page import published_figures, write

__all__ = ["gallery_png", "published_figures", "write"]
