"""Imported by the server that ranks are forked from, so that none has to do it all again.

Among it is what torch imports when it first takes derivatives of a module.
"""

import jsonargparse  # noqa: F401
import torch

import exhume.cli.audit  # noqa: F401
from exhume.methods import reconstruct
from rank_tasks import last_layer

torch.set_num_threads(1)  # more would not outlive a fork
reconstruct(last_layer(), 2, product_limit=1)
