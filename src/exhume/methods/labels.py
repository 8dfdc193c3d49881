"""Labels of samples that nobody told: which sets of them may be, and labels as unknowns.

The change of the weights says which classes have samples. The likeliest sets of labels are tried
one after the other. After those, labels are found beside the samples by the same least squares: the
gradient of a loss is linear in them. Where the last layer does not tell, small networks choose
labels with the start, by where a run of them ends (`starts.picked`).
"""

from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import one_hot

from exhume.equation.domain import Beside, Simplex
from exhume.equation.problem import Problem
from exhume.features.replay import TrainingRun
from exhume.methods.progress import stream
from exhume.solvers.levenberg_marquardt import Metric

LABEL_SETS = 12  # of those that the weights allow, so many of the likeliest are tried
DOUBT = 0.3  # share of a label that is of any class at first: with 0.02, labels stay what they are
OWED = 1e-2  # share of the largest gain of a class that others may owe to weight decay


@dataclass(frozen=True, eq=False, kw_only=True)
class Unlabelled(TrainingRun):
    """The run as a map of rows (x, y): what labels it is given beside them is not looked at."""

    @property
    def dim(self) -> int:
        """Return d + c, the entries of a sample and its label."""
        return super().dim + self.outputs

    def loss(self, theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return ℓ(θ, X, Y) of a batch of rows (x, y), (n, d + c)."""
        x, y = inputs.tensor_split([super().dim], 1)
        return super().loss(theta, x, y)


@dataclass(frozen=True)
class Partial:
    """A metric of the first entries of rows alone: the others stay as they are."""

    metric: Metric
    entries: int

    def power(self, rows: Tensor, exponent: float) -> Tensor:
        """Return each row (x, y) of (n, d + c) as (S^exponent x, y)."""
        x, y = rows[:, : self.entries], rows[:, self.entries :]
        return torch.cat([self.metric.power(x, exponent), y], 1)


def unlabelled(problem: Problem) -> Problem:
    """Return the problem whose candidates are rows (x, y) of a sample and the shares of classes."""
    run = run_of(problem)
    entries = {each.name: getattr(run, each.name) for each in fields(run)}
    if run.span is not None:  # labels are free in it
        own = run.span, torch.eye(run.outputs).to(run.span)
        entries["span"] = torch.block_diag(*own)  # type: ignore[no-untyped-call]
    soft = Unlabelled(**entries)
    domain = Beside(problem.domain, Simplex(), problem.dim)
    return replace(problem, features=soft, domain=domain, shape=(soft.dim,))


def run_of(problem: Problem) -> TrainingRun:
    """Return the training run that a problem of the premise replay has for features."""
    return cast(TrainingRun, problem.features)


def rows_of(classes: Tensor, outputs: int) -> Tensor:
    """Return the labels (n, c) of classes (n,): one-hot rows, or ±1 for one output."""
    return one_hot(classes.long(), outputs) if outputs > 1 else 2 * classes.long()[:, None] - 1


def label_sets(
    problem: Problem, lazy: Tensor, raised: Tensor, count: int, most: int
) -> list[Tensor]:
    """Return the labels (n, c) that so many samples may have, at most so many, the likeliest first.

    Of the lazy solution (m, d) the outputs say how training begins with each label; how much each
    sample raised them, (m, c), is asked where the last layer shows nothing. Last comes a set with
    shares of several classes, in whose place labels are unknowns: among the sets it costs more.
    """
    run, like = run_of(problem), problem.target
    classes, known = run.outputs, run.labels
    if known is not None:
        return [rows_of(torch.tensor(known), classes).to(like)]
    if classes == 1:
        each = (torch.arange(count) < k for k in range(count + 1))
        return [rows_of(positive, 1).to(like) for positive in each]
    gains = class_gains(problem)
    gains = raised.double().sum(0).cpu() if gains is None else gains
    likely = likely_counts(gains, pulls(run, lazy), count, must_have(problem, gains))[:most]
    sets = [rows_of(torch.arange(classes).repeat_interleave(c), classes).to(like) for c in likely]
    return [*sets, softened(sets[0], torch.stack(likely).to(like).mean(0) / count)]


def pulls(run: TrainingRun, inputs: Tensor) -> Tensor:
    """Return how fast outputs rise at first where all inputs (m, d) are of a class, a row each."""
    with torch.no_grad():
        outputs = run.network(run.points[0], inputs).double()
    rise = grad(lambda outputs, label: -run.recipe.value(outputs, label.expand_as(outputs)))
    rows = [rise(outputs, row).sum(0) for row in torch.eye(run.outputs).to(outputs)]
    return torch.stack(rows).cpu()


def fractional(labels: Tensor) -> bool:
    """Tell whether labels (n, c) have shares of several classes."""
    return bool((labels != labels.round()).any())


def softened(labels: Tensor, shares: Tensor) -> Tensor:
    """Return labels (n, c) with a part of each in all classes, by their shares (c,)."""
    return torch.lerp(labels, shares.to(labels).expand_as(labels), DOUBT)


def likely_counts(gains: Tensor, pulls: Tensor, count: int, needed: Tensor) -> list[Tensor]:
    """Return how many samples each class may have, (c,), the likeliest first.

    The gradient of a loss is linear in labels: outputs rise by the mean of the samples' `pulls`
    (c, c), for which in cross-entropy they are y − p. So counts are ranked by the angle of what
    they pull to the gains: from all in one class, moving one at a time while that helps. Counts
    without a class that is needed come after all with it.
    """

    def fitness(counts: Tensor) -> float:
        missing = int((needed & (counts == 0)).sum())
        return float(torch.cosine_similarity(counts.double() @ pulls, gains, dim=0)) - 2 * missing

    here = count * (torch.arange(len(gains)) == gains.argmax()).long()
    seen = {tuple(here.tolist()): fitness(here)}
    while True:
        steps = torch.eye(len(gains), dtype=torch.long)
        moves = (here - steps[a] + steps[b] for a in here.nonzero() for b in range(len(gains)))
        near = {tuple(move.flatten().tolist()): fitness(move.flatten()) for move in moves}
        best = max(near, key=near.__getitem__)
        better = near[best] > seen[tuple(here.tolist())]
        seen |= near
        if not better:
            return [torch.tensor(counts) for counts in sorted(seen, key=lambda c: -seen[c])]
        here = torch.tensor(best)


def least_count(problem: Problem) -> int:
    """Return how many samples there are at least: one of each class that must have some."""
    gains = class_gains(problem)
    return 1 if gains is None else max(1, int(must_have(problem, gains).sum()))


def must_have(problem: Problem, gains: Tensor) -> Tensor:
    """Tell of each class whether it has samples, (c,): without any, its outputs do not rise."""
    return (gains > OWED * gains.max()) & telling(problem)


def telling(problem: Problem) -> bool:
    """Tell whether the change of the last layer says which classes have samples.

    It does where outputs of other classes can but fall. With label smoothing, or mean squares, they
    are drawn to a value, and may rise. Of one output all sets of labels are tried.
    """
    run = run_of(problem)
    sharp = run.recipe.loss == "cross_entropy" and not run.recipe.label_smoothing
    head = run.network.head_bias, run.network.head_weight
    return run.outputs == 1 or (sharp and any(name in run.block for name in head))


def class_gains(problem: Problem) -> Tensor | None:
    """Return how much each class gained in training, (c,): the change of the last bias.

    Without one, it is the change of the last layer's outputs for what inputs of the same kind, or
    random ones, give it on average; None if that layer is frozen.
    """
    run = run_of(problem)
    (before, after), head = run.points, run.network.head_weight
    if (bias := run.network.head_bias) in run.block:
        return (after[bias] - before[bias]).double().cpu()
    if head not in run.block:
        return None
    drawn = problem.domain.start(64, problem.dim, stream(0, 0))
    inputs = (drawn if run.public is None else run.public).to(problem.target)
    with torch.no_grad():
        hidden = run.network.hidden(before, inputs).mean(0)
    return ((after[head] - before[head]) @ hidden).double().cpu()
