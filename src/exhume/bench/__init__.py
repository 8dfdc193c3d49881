"""Measurements: `exhume bench NAME`. Speed is shown as ratios taken in one run."""

from exhume.bench.count import count
from exhume.bench.identifiability import identifiability
from exhume.bench.images import images
from exhume.bench.kkt import kkt
from exhume.bench.networks import networks
from exhume.bench.solvers import solvers
from exhume.bench.splitting import splitting
from exhume.bench.streaming import streaming
from exhume.bench.threshold import threshold

COMMANDS = {
    "solvers": solvers,
    "threshold": threshold,
    "count": count,
    "streaming": streaming,
    "images": images,
    "networks": networks,
    "identifiability": identifiability,
    "kkt": kkt,
    "splitting": splitting,
}
