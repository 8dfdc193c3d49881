"""Claims of the sources: `exhume reproduce NAME` runs their cells and judges them.

`CLAIMS` has all of them, in the order of docs/reproduction.md.
"""

from exhume.experiments.claims.claim import Claim
from exhume.experiments.claims.law import LAW_CLAIMS
from exhume.experiments.claims.networks import NETWORK_CLAIMS
from exhume.experiments.claims.splitting import SPLITTING_CLAIMS
from exhume.experiments.claims.subspace import SUBSPACE_CLAIMS

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (*LAW_CLAIMS, *NETWORK_CLAIMS, *SUBSPACE_CLAIMS, *SPLITTING_CLAIMS)
}
