"""Claims of the sources: `exhume reproduce NAME` runs their cells and judges them.

`CLAIMS` has all of them, in the order of docs/reproduction.md.
"""

from exhume.experiments.claims import law, margin, networks, splitting, subspace
from exhume.experiments.claims.claim import Claim

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for module in (law, networks, subspace, margin, splitting)
    for claim in vars(module).values()
    if isinstance(claim, Claim)
}
