"""What a run shows without the truth: a probability for each candidate, a verdict, and advice.

The probability is that of a small logistic model of what the weights say of a candidate (`signs`).
Its coefficients are in calibration.json, learnt on problems of our own whose truth is known:
`exhume bench calibration` learns them again, and says how often they are right on other problems.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from exhume.auditing.suspects import EXPLAINED
from exhume.equation.domain import Sphere
from exhume.equation.objective import fitted
from exhume.equation.problem import Premise, Problem
from exhume.features.modules import BlockFeatures, ModuleFeatures
from exhume.methods import Reconstruction
from exhume.search.moves import drop_costs
from exhume.search.subspace import directions, span
from exhume.solvers import Outcome
from exhume.theory.support import CUT, NOWHERE, Support, support

SIGNS = ("error", "residual", "weight", "ratio", "settled", "alone", "again", "outside")
MATCHED = 0.1  # as near as a candidate must be to a training sample to count as that one
SURE = 0.95  # from this probability on a candidate counts as found: one in twenty may be wrong
WIDEST = 10.0  # equations for each unknown, of the problems that probabilities were learnt on
MISSING = 0.01  # with more than this left, a sample is missing, whatever is pinned down
ABOVE = 10.0  # a residual this many times what may be left is far above it
FOUND, CANNOT = ("reconstructed", "partly"), "cannot tell"  # verdicts: something, and not known
CALIBRATION = "calibration.json"

LONGER = "Give it more time: raise --time-limit or --product-limit."
BOUND = "How many samples each block could give up at most: exhume bound MODEL."
SEED = "The search may have failed, too: try another --seed."
RECIPE = "If you know how it was trained, replay it: --premise replay --recipe FILE."
START = (
    "If the initial weights are known, explain their change: --target change, and --initial FILE "
    "too where the model is your own."
)


@dataclass(frozen=True)
class Asked:
    """This is what an audit was asked for."""

    parameters: str = "last"  # the block that was attacked
    point: str | None = None  # where features were taken; None where they do not move
    samples: int | None = None  # how many were told


NOTHING = Asked()  # but the defaults


@dataclass(frozen=True, eq=False)
class Judgement:
    """A judgement says what a run shows, how sure that is, and what to do next."""

    verdict: str  # reconstructed, partly, no evidence or cannot tell
    reason: str  # in a sentence
    probabilities: Tensor  # that each candidate is a training sample, (n,) float64
    advice: list[str]  # what to try next, a sentence each
    support: Support  # what the candidates rest on
    again: Tensor | None = None  # whether each was found from another start, see `signs`
    chance: str | None = None  # the control in which the same attack found as much

    @property
    def sure(self) -> int:
        """Return how many candidates are taken for training samples."""
        return int((self.probabilities >= SURE).sum())


def judge(
    problem: Problem,
    found: Reconstruction,
    rests: Support | None = None,
    model: dict[str, Any] | None = None,
    asked: Asked = NOTHING,
    again: Tensor | None = None,
) -> Judgement:
    """Weigh what an attack found, by the weights alone.

    The support is measured if None; the model of the probabilities is the package's if None.
    `again` says of each candidate whether another start found it, (n,), see `signs`.
    """
    rests = support(problem, found) if rests is None else rests
    chances = probabilities(signs(problem, found, rests, again), model)
    tips, more = advice(problem, found, asked), _more(problem, found, asked)
    verdict, reason, ways = _verdict(problem, found, rests, chances, tips)
    if more is not None:  # then nothing is complete, and what was found may be mixtures of samples
        verdict = "partly" if verdict == "reconstructed" else verdict
        reason, ways = f"{reason} But {more[0]}.", [more[1], *ways]
    return Judgement(verdict, reason, chances, [said for said in ways if said], rests, again)


def signs(
    problem: Problem, found: Reconstruction, rests: Support, again: Tensor | None = None
) -> Tensor:
    """Return what the weights say of each candidate, (n, 8), in the order of SIGNS.

    error     log₁₀ of its standard error, see `theory.support`, with no more equations to spare
              than where this was learnt; 0 for one as large as the candidate, or larger, and where
              it is not known
    residual  log₁₀ of what all candidates leave
    weight    log₁₀ of what dropping it would cost, in units of the residual
    ratio     log₁₀ of the equations for each unknown
    settled   1 where trials that dropped many candidates found them again, else 0
    alone     1 where trained weights alone were explained, else 0
    again     1 where another start led to it, −1 where none did, 0 where that is not known
    outside   log₁₀ of its share outside the samples' span, which another block shows, over
              `MATCHED`: one with more is not that near to any sample; 0 with less, and where it is
              not known, see `_outside`
    """
    count, left = len(found.samples), max(found.residual, 1e-14)
    rows = torch.zeros(count, len(SIGNS), dtype=torch.float64)
    beyond = math.sqrt(max(1.0, (rests.ratio - 1) / (WIDEST - 1)))
    rows[:, 0] = (beyond * rests.errors.nan_to_num(math.inf)).clamp(1e-8, 1.0).log10()
    rows[:, 1] = min(0.0, math.log10(left)) if math.isfinite(left) else 0.0
    rows[:, 2] = (_weights(problem, found) / left).clamp(1e-2, 1e14).log10()
    rows[:, 3] = math.log10(min(max(rests.ratio, 0.1), WIDEST))
    rows[:, 4] = float(found.outcome is Outcome.SETTLED)
    rows[:, 5] = float(problem.premise.weights_alone)
    rows[:, 6] = 0 if again is None else again
    rows[:, 7] = _outside(problem, found)
    return rows


def _outside(problem: Problem, found: Reconstruction) -> Tensor | float:
    """Return log₁₀(‖x − UUᵀx‖ / (`MATCHED` ‖x‖)) of each candidate x, or 0 if that is more, (n,).

    U (d, r) spans the change of the first layer. It is not known, and 0, where that layer is part
    of the equation, so that the residual tells as much. To lie in the span is no merit: mixtures of
    samples do, too.
    """
    apart = problem.premise is Premise.CHANGE and not isinstance(problem.features, BlockFeatures)
    samples = span(problem.first_layer) if apart else None
    x = found.samples.double().cpu()
    if samples is None or not x.isfinite().all():
        return 0.0
    shares: Tensor = (x - x @ samples.basis @ samples.basis.T).norm(dim=1) / x.norm(dim=1)
    return (shares / MATCHED).nan_to_num(1.0).clamp_min(1.0).log10()


def worth_again(problem: Problem, found: Reconstruction, rests: Support) -> bool:
    """Tell whether another start could tell more of the candidates than is known already.

    Not where others fit as well whatever it leads to, nor where nothing explains the weights.
    """
    return rests.enough and not problem.premise.weights_alone and found.residual <= NOWHERE


def _weights(problem: Problem, found: Reconstruction) -> Tensor:
    """Return what dropping each candidate would cost, as a share of ‖Δ‖², (n,)."""
    ones = torch.ones(len(found.samples), dtype=torch.float64)
    if problem.premise is Premise.REPLAY:  # labels have no cost in closed form: all weigh the same
        return ones
    if not found.samples.isfinite().all():
        return 0 * ones
    try:
        return drop_costs(problem, fitted(problem, found.samples)).cpu()
    except (RuntimeError, MemoryError):  # as in `support`: it is not known
        return 0 * ones


@cache
def calibration() -> dict[str, Any]:
    """Return what calibration.json holds: the model, and how it came about."""
    file = Path(__file__).with_name(CALIBRATION)
    return cast(dict[str, Any], json.loads(file.read_text(encoding="utf-8")))


def probabilities(rows: Tensor, model: dict[str, Any] | None = None) -> Tensor:
    """Return 1/(1 + exp(−b − Σ_j w_j x_ij)) of signs x, (n, 8) → (n,)."""
    learnt = calibration() if model is None else model
    weights = torch.tensor([learnt["weights"][name] for name in SIGNS], dtype=torch.float64)
    return torch.sigmoid(rows @ weights + learnt["intercept"])


def _verdict(
    problem: Problem, found: Reconstruction, rests: Support, chances: Tensor, tips: dict[str, str]
) -> tuple[str, str, list[str]]:
    """Return the verdict, its reason and what to try next; advice may be empty."""
    count, sure = len(chances), int((chances >= SURE).sum())
    most = allowed(problem)
    cut, settled = found.outcome in CUT, found.outcome is Outcome.SETTLED
    residual = f"the residual is {found.residual:.1e}"
    if not rests.enough:
        few = f"{rests.ratio:.2f} equations for each unknown are too few: others would fit as well."
        return CANNOT, few, [tips["wider"], BOUND]
    if problem.premise.weights_alone:
        many = f"With the premise {problem.premise.value} very different candidates explain the "
        return CANNOT, f"{many}same weights.", [tips["start"], tips["recipe"]]
    if count and sure == count and found.residual > MISSING and not settled:
        missing = f"but {residual}: what is left must come from others"
        return "partly", f"All {count} candidates are pinned down, {missing}.", [tips["other"]]
    if count and sure == count:
        doubt = "no other candidates fit as well"
        return "reconstructed", f"All {count} candidates are pinned down, and {doubt}.", []
    if sure:
        rest = "the others are not, and are the first to be wrong"
        way = LONGER if cut else tips["other"]
        return "partly", f"{sure} of {count} candidates are pinned down; {rest}.", [way]
    if cut:
        checked = [tips["check"]] if found.residual > NOWHERE else []
        return CANNOT, f"The search was cut off before it ended: {residual}.", [LONGER, *checked]
    if found.residual > ABOVE * most:
        far = f"far above the {most:.0e} that precision and moving features may leave"
        ways = [tips["check"], SEED, tips["recipe"]]
        return CANNOT, f"Nothing explains the weights: {residual}, {far}.", ways
    if not rests.measured:
        return CANNOT, "How far candidates may be off could not be measured.", [tips["memory"]]
    none = f"No candidate is pinned down: {residual}, and each may be off by more than that shows."
    return "no evidence", none, [tips["other"], tips["recipe"]]


def allowed(problem: Problem) -> float:
    """Return the residual that precision and moving features may leave."""
    return max(problem.drift, problem.resolution, EXPLAINED)


def _more(problem: Problem, found: Reconstruction, asked: Asked) -> tuple[str, str] | None:
    """Return what speaks for more samples than candidates, and how to ask for them; else None."""
    count, tried = len(found.samples), found.explained or 0
    if found.outcome is Outcome.CONVERGED:
        return None
    rank = directions(problem.first_layer)
    if rank is not None and rank > count:
        there = rank
        why = f"the first layer changed in {rank} directions, which takes as many samples"
    elif rank is None and tried > count:  # else these fit what moving features left, with no sample
        there = tried
        why = f"{tried} candidates explained the weights on the way, and {count} do not"
    else:
        return None
    left = "" if asked.samples is None else "leave the number out, or "
    return why, f"There may be more samples: {left}ask for {there} (--samples {there})."


def advice(problem: Problem, found: Reconstruction, asked: Asked = NOTHING) -> dict[str, str]:
    """Return a sentence for each thing to try, by its name; an empty one where none is left.

    wider   what has more equations, or fewer unknowns
    other   what else may find more
    check   what the audit was told that may not be so
    recipe  the training run, which leaves less open than any premise
    start   the initial weights, for weights alone
    memory  what takes less of it
    """
    change, replayed = problem.premise is Premise.CHANGE, problem.premise is Premise.REPLAY
    blocks: list[str] = []
    if change and problem.drift > 0 and asked.parameters != "all":
        blocks.append("another block (--parameters all)")
    span = problem.first_layer is not None and isinstance(problem.domain, Sphere)
    if change and span and found.rank is None:
        blocks.append("the samples' span (--method tansley2026)")
    point = change and asked.point not in (None, "both")
    others = [*blocks, *(["another point (--point both)"] if point else []), "another --seed"]
    tell = f"Attack {' or '.join(blocks)}, or tell" if blocks else "Tell"
    steps = "the optimiser (Adam and weight decay need --premise replay, or decay)"
    # features that never moved may be random ones, without a run
    network = isinstance(problem.features, ModuleFeatures) or problem.drift > 0
    place = "" if problem.target.device.type == "cpu" else " (--device cpu)"
    return {
        "wider": f"{tell} more of what is known of the inputs: their range or norm.",
        "other": f"Try {', '.join(others)}.",
        "check": "Check what the audit was told: that training began at these initial weights, "
        f"{'the recipe' if replayed else steps}, and the range or norm of inputs.",
        "recipe": RECIPE if network and not replayed else "",
        "start": START if problem.start is None else "",
        "memory": f"Audit where there is more memory{place}, or fewer parameters.",
    }
