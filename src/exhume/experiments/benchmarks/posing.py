"""Problems with the truth beside them, and such that hold no truth, for benches of what is said."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exhume import data, victims
from exhume.auditing.controls import Repeat, again, permuted, untrained
from exhume.auditing.judgement import SURE, worth_again
from exhume.data import Data
from exhume.equation.problem import Problem
from exhume.evaluate import RECOVERED
from exhume.evaluate.metrics import distances
from exhume.experiments.benchmarks.bases import loaded
from exhume.experiments.cells.attack import Attack
from exhume.methods import Reconstruction
from exhume.theory.support import Support


def of_another(problem: Problem, seed: int) -> Problem:
    """Return the problem with the weights of another model of random features for its target."""
    known = data.sphere(problem.dim, 4, seed + 500)
    other = victims.random_features(known, problem.features.width, "relu", seed + 500)
    return replace(problem, target=other.problem.target)


Nothing = Callable[[Problem, int], Problem | None]
NOTHING: dict[str, Nothing] = {
    "target permuted": permuted,
    "other initial weights": of_another,
    "untrained head": untrained,
}


@dataclass(frozen=True, eq=False)
class Posed:
    """A problem is posed here, with the truth beside it."""

    name: str  # of its kind
    problem: Problem
    truth: Tensor  # (n, d); what a control would have to find
    told: int | None  # how many samples the attack is told of
    seed: int
    control: bool = False  # whether there is nothing to find

    def without(self, name: str, changed: Nothing) -> "Posed":
        """Return a control of that name: the same problem with nothing in it to be found."""
        problem = changed(self.problem, self.seed)
        assert problem is not None, "there is such a problem of all that are posed here"
        return replace(self, name=name, problem=problem, control=True)

    def true(self, candidates: Tensor) -> Tensor:
        """Tell of each candidate whether it is a training sample, (n,)."""
        near = distances(self.truth, candidates) / self.truth.norm(dim=1, keepdim=True)
        found: Tensor = near.amin(0) < RECOVERED
        return found & (not self.control)


def once_more(one: Posed, found: Reconstruction, rests: Support) -> Tensor | None:
    """Attack from another start where an audit would; say what that leads to, as `again` does."""
    if not worth_again(one.problem, found, rests):
        return None
    return again(one.problem, Repeat(found, "exhume", lambda: None, lambda phase: None))


def posed(name: str, cell: Attack) -> Posed:
    """Pose the problem of a cell."""
    known = cell.known()
    width = max(cell.width(known), cell.samples + 1)
    problem = cell.victim(known, width, "cpu").posed(cell.block).to("cpu")
    return Posed(name, problem, known.inputs, cell.told or cell.samples, cell.seed)


def activation(seed: int) -> str:
    """Return the activation of the problems of a seed."""
    return ("relu", "tanh", "gelu")[seed % 3]


def table(seed: int, ratio: float) -> Posed:
    """Pose the problem of four rows of a table of patients, each with norm √d."""
    rows = loaded("table", 0, False)
    order = torch.randperm(rows.samples, generator=torch.Generator().manual_seed(seed))[:4]
    inputs, targets = rows.inputs[order], rows.targets[order].argmax(1, keepdim=True) * 2.0 - 1
    known: Data = data.from_arrays(inputs.numpy(), targets.numpy(), normalise=True, name="table")
    width = max(round(ratio * known.dim * 4), 5)
    victim = victims.random_features(known, width, activation(seed), seed)
    return Posed("table", victim.problem, known.inputs, 4, seed)


def by_kind(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return runs by the name of what was attacked."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        kinds.setdefault(run["name"], []).append(run)
    return kinds


def summed(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how often there was each verdict, and how many candidates it was wrongly sure of."""
    counts = Counter(run["verdict"] for run in runs)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    wrong = sum(int(((run["said"] >= SURE) & ~run["true"]).sum()) for run in runs)
    return {"name": name, "runs": len(runs), "verdicts": said, "wrong": wrong}
