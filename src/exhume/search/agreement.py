"""Several runs of one attack pooled: what comes back in others is kept, as much as one run has."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Cosine from which on candidates count as one. Of 24 faces and 40 photographs (8 runs each) more
# come back with this than with 0.9 or 0.97, where the same few are returned again and again
SAME = 0.8
NEARBY = 3  # runs that must have one like it; with one, chance finds it, with all, few are left


def agreed(runs: Tensor) -> Tensor:
    """Return as many candidates as one of R runs has, (R, k, d) → (k, d): those that come back.

    A candidate is worth the least of its cosines with the nearest ones of `NEARBY` other runs,
    those that have the nearest. The best comes first, as the mean direction of all that are like
    it, which are then no longer there; if none is left, the best of those come as they are.
    """
    count, each, _ = runs.shape
    pool = runs.flatten(0, 1)
    units = normalize(pool)
    alike = units @ units.T
    nearest = alike.view(-1, count, each).amax(2)
    nearest[torch.arange(len(pool)), torch.arange(count).repeat_interleave(each)] = -torch.inf
    worth = nearest.topk(min(NEARBY, count - 1), 1).values[:, -1]
    left, means = worth.clone(), list[Tensor]()
    while len(means) < each and left.max() > -torch.inf:
        best = int(left.argmax())
        like = alike[best] >= SAME
        like[best] = True
        means.append(normalize(units[like].mean(0), dim=0) * pool[best].norm())
        left[like] = -torch.inf
    rest = pool[worth.argsort(descending=True)[: each - len(means)]]
    return torch.cat([torch.stack(means), rest])
