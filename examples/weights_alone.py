"""Weights alone: faces out of a network that was trained until it fitted them, its start unknown.

What comes back is not exact, but can be recognised. How much of that is chance, the same count of
faces that the network never saw tells.
"""

from pathlib import Path

import exhume
from exhume.report.gallery import pairs_png

private = exhume.data.load("faces", samples=24, centre="pixels")
victim = exhume.victims.kkt_mlp(private, widths=(200, 200), training="flow")

# The rows of the first layer are mixtures of the faces, and are unmixed. Published attacks solve
# the KKT conditions instead: method=exhume.methods.preset("haim2022", "b9").
found = exhume.reconstruct(victim.problem, samples=24)
print(f"{len(found.samples)} candidates leave a residual of {found.residual:.2f}")

seen = exhume.evaluate.recognised(found.samples, private, exhume.data.held_out(private))
print(f"{seen.ssim} of 24 faces are recognisable (SSIM over 0.4), of others {seen.control.ssim}")
print(f"{seen.cosine90} have a cosine over 0.9, of others {seen.control.cosine90}")
best = seen.ssims.argsort(descending=True)
notes = [f"SSIM {seen.ssims[row]:.2f}" for row in best]
pairs_png(seen.originals[best], seen.pictures[best], notes, Path("weights_alone.png"), limit=12)
