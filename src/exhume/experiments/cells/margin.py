"""Networks trained to the margin, or to rest, and the images that their weights alone give."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from exhume import data, victims
from exhume.data import Data
from exhume.evaluate import recognised
from exhume.methods import preset, reconstruct
from exhume.methods.penalised import Penalised
from exhume.victims import Victim


@dataclass(frozen=True)
class Case:
    """A case says what is trained on what, and which published attack is made on it."""

    data: Callable[[int], Data]  # by seed
    widths: tuple[int, ...]
    recipe: str
    preset: str  # of the recipe: a published one for such data
    steps: int = 6000  # of training to rest
    decay: float | None = None  # on the squared loss; such a network is always trained to rest

    def trained(self, training: str, seed: int, **how: Any) -> Victim:
        """Train on the data of a seed, in the way asked for unless weight decay says another."""
        if self.decay is not None:
            how |= {"decay": self.decay, "loss": "squared"}
        if training == "rest" or self.decay is not None:
            training, how["steps"] = "rest", self.steps
        return victims.kkt_mlp(self.data(seed), self.widths, training, seed, **how)


images = partial(data.load, centre="pixels")
parity, vehicles = partial(images, classes="parity"), partial(images, classes="vehicles")
SMALL, BIG = (200, 200), (1000, 1000)  # for two cores, and the published widths
CASES = {
    "faces": Case(partial(images, "faces", 24), SMALL, "haim2022", "b9"),
    "digits": Case(partial(parity, "digits", 20), SMALL, "haim2022", "rbij"),
    "digits_ten": Case(
        partial(images, "digits", 40, classes="all"), SMALL, "buzaglo2023", "classes1"
    ),
    # so much decay that weights of that size come to rest in so many steps
    "faces_decay": Case(
        partial(images, "faces", 24), SMALL, "buzaglo2023", "decay1", 10_000, decay=5e-3
    ),
    "mnist": Case(partial(parity, "mnist", 100), BIG, "haim2022", "kcf9"),
    "mnist_500": Case(partial(parity, "mnist", 500), BIG, "haim2022", "kcf9", 15_000),
    "cifar10": Case(partial(vehicles, "cifar10", 100), BIG, "haim2022", "b9"),
    "cifar10_500": Case(partial(vehicles, "cifar10", 500), BIG, "haim2022", "b9", 15_000),
    "classes": Case(
        partial(images, "cifar10", 500, classes="all"), BIG, "buzaglo2023", "classes1", 30_000
    ),
    "decay": Case(
        partial(vehicles, "cifar10", 100), BIG, "buzaglo2023", "decay1", 15_000, decay=7.5e-4
    ),
}


@dataclass(frozen=True)
class WeightsAlone:
    """Attack a network of `CASES` along gradient flow, or at rest under decay, by its preset."""

    case: str = "faces"
    steps: int = 1000
    seed: int = 0

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(cast(Any, CASES[self.case].data).args[0])

    def run(self, device: str) -> dict[str, Any]:
        """Return how many `samples` are recognisable, by each count, and of as many held out."""
        case = CASES[self.case]
        victim = case.trained("flow", self.seed, device=device)
        problem, known = victim.problem.to(device), victim.truth
        recipe = cast(Penalised, preset(case.recipe, case.preset, problem))
        found = reconstruct(problem, known.samples, self.seed, replace(recipe, steps=self.steps))
        seen = recognised(found.samples, known, data.held_out(known, seed=self.seed)).to_dict()
        kept = ("samples", "ssim", "cosine80", "cosine90")
        held = {f"held_out_{word}": seen["control"][word] for word in kept}
        mean = sum(seen["cosines"]) / known.samples
        return {**{word: seen[word] for word in kept}, **held, "cosine": mean}
