"""Whether weights determine their samples: rank conditions, and samples recovered from them."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn

from exhume import data, theory, victims
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.experiments.cells.attack import Attack
from exhume.models.architectures import initialise, two_layer
from exhume.models.folder import NetworkModel
from exhume.theory import Identifiability, local_identifiability
from exhume.theory.moments import contract, decompose, powers
from exhume.victims import Victim

# Most relative error, up to the sign, of a sample that counts as recovered from a KKT point: that
# is algebra in float64, and what is right is right to six digits and more.
EXACT = 1e-4


@dataclass(frozen=True)
class Determined:
    """Find out whether the equations of an `Attack` determine its samples, to first order."""

    data: str = "digits"
    classes: str = "parity"
    samples: int = 2
    ratio: float = 1.0
    architecture: str = "vit"
    lazy: float = 30.0
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Train, and take the rank at the truth: `rank` and `unknowns`."""
        attack = Attack(**asdict(self))
        known = attack.known()
        victim = attack.victim(known, attack.width(known), device)
        found = local_identifiability(victim.posed().to(device), known.inputs, within=True)
        return {"rank": found.rank, "unknowns": found.unknowns}


@dataclass(frozen=True)
class Rank:
    """Check the rank condition for `width` random neurons z^α, α the degree, in dimension d."""

    dim: int = 3
    width: int = 4
    degree: int = 3
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Check it: `rank`, `unknowns` and `holds`; on the processor, in float64."""
        sigma = "polynomial:" + ",".join(["0"] * self.degree + ["1"])
        network = initialise(two_layer((self.dim,), self.width, activation=sigma), self.seed)
        found = theory.identifiability(network.double())
        return {"rank": found.rank, "unknowns": found.unknowns, "holds": found.holds}


@dataclass(frozen=True)
class TensorTerms:
    """Recover samples, at most d, from the tensor Σ_i b_i x_i^{⊗α}, where that is known.

    For the degree α = 2 the terms are eigenvectors, one of many ways to write the matrix.
    """

    dim: int = 5
    samples: int = 4
    degree: int = 3
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Return the `rest` of the tensor, and as `error` the worst sine of sample and term."""
        known = data.sphere(self.dim, self.samples, self.seed).inputs
        known = known / known.norm(dim=1, keepdim=True)
        generator = torch.Generator().manual_seed(self.seed)
        weights = 1 + torch.rand(self.samples, generator=generator, dtype=torch.float64)
        tensor = weights @ powers(known, self.degree)
        if self.degree == 2:
            square = contract(tensor, torch.eye(self.dim, dtype=tensor.dtype), 2)
            values, vectors = torch.linalg.eigh(square)
            terms = vectors[:, -self.samples :].T
            rest = float((square - vectors @ torch.diag(values) @ vectors.T).norm() / square.norm())
        else:
            terms, _, rest = decompose(tensor, self.dim, self.degree, 1e-10)
        cosines = score(terms, known).cosines
        return {"rest": rest, "error": float((1 - cosines.square()).clamp_min(0).sqrt().max())}


@dataclass(frozen=True)
class Stationary:
    """Solve for a network of z^α at an exact KKT point, and recover its samples."""

    dim: int = 10
    samples: int = 4
    degree: int = 3
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Solve for it, and recover: `error`, the worst relative one; on the processor."""
        victim, found = self.victim()
        if found.samples is None:
            return {"error": None}
        return {"error": float(score(found.samples, victim.truth).errors.max())}

    def victim(self) -> tuple[Victim, Identifiability]:
        """Return a victim that fulfils the condition, under the first labels that allow it."""
        width = 2 * theory.fewest_neurons(self.degree, self.samples)
        known = data.sphere(self.dim, self.samples, self.seed)
        for labelled in victims.labellings(known, self.degree, self.seed):
            with suppress(InputError):
                found = self.judged(labelled, width)
                if found[1].holds:
                    return found
        failed = f"seed {self.seed}: no labels give a KKT point of {width} neurons that fulfils it"
        raise InputError(f"{failed}; take a larger --dim, where samples are nearer to orthogonal.")

    def judged(self, known: Data, width: int) -> tuple[Victim, Identifiability]:
        """Return the KKT point of so many neurons, and whether it fulfils the condition."""
        victim = victims.polynomial(known, width, self.degree, self.seed)
        return victim, theory.identifiability(module_of(victim), victim.trained)


def module_of(victim: Victim) -> nn.Module:
    """Return the network of a victim that has one."""
    return cast(NetworkModel, victim.model).network.module
