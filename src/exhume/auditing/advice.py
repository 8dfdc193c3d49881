"""What to try next after an audit: only what is there to be tried, and was not tried yet."""

from dataclasses import dataclass

from exhume.equation.problem import Premise, Problem
from exhume.features.modules import ModuleFeatures
from exhume.methods import Reconstruction


@dataclass(frozen=True)
class Asked:
    """This is what an audit was asked for."""

    parameters: str = "last"  # the block that was attacked
    point: str | None = None  # where features were taken; None where they do not move
    samples: int | None = None  # how many were told


NOTHING = Asked()  # but the defaults

LONGER = "Give it more time: raise --time-limit or --product-limit."
BOUND = "How many samples each block could give up at most: exhume bound MODEL."
SEED = "The search may have failed, too: try another --seed."


@dataclass(frozen=True)
class Advice:
    """A sentence for each thing to try; an empty one where there is no such thing left."""

    problem: Problem
    found: Reconstruction
    asked: Asked

    @property
    def _blocks(self) -> list[str]:
        """The ways to more equations: another block, fewer unknowns."""
        problem = self.problem
        ways: list[str] = []
        if problem.premise is not Premise.CHANGE:
            return ways
        if problem.drift > 0 and self.asked.parameters != "all":
            ways.append("another block (--parameters all)")
        if problem.first_layer is not None and self.found.rank is None:
            ways.append("the samples' span (--method tansley2026)")
        return ways

    @property
    def wider(self) -> str:
        """What has more equations, or fewer unknowns."""
        ways = [f"Attack {' or '.join(self._blocks)}, or tell"] if self._blocks else ["Tell"]
        return f"{ways[0]} more of what is known of the inputs: their range or norm."

    @property
    def other(self) -> str:
        """What else may find more."""
        ways = self._blocks
        if self.problem.premise is Premise.CHANGE and self.asked.point not in (None, "both"):
            ways.append("another point (--point both)")
        return f"Try {', '.join([*ways, 'another --seed'])}."

    @property
    def check(self) -> str:
        """What the audit was told that may not be so."""
        replayed = self.problem.premise is Premise.REPLAY
        why = "" if replayed else " (Adam and weight decay need --premise replay, or decay)"
        said = "the recipe" if replayed else f"the optimiser{why}"
        began = "that training began at these initial weights"
        return f"Check what the audit was told: {began}, {said}, and the range or norm of inputs."

    @property
    def recipe(self) -> str:
        """The training run, which leaves less open than any premise."""
        problem = self.problem  # features that never moved may be random ones, without a run
        network = isinstance(problem.features, ModuleFeatures) or problem.drift > 0
        told = "If you know how it was trained, replay it: --premise replay --recipe FILE."
        return told if network and problem.premise is not Premise.REPLAY else ""

    @property
    def start(self) -> str:
        """The initial weights, for weights alone."""
        own = "and --initial FILE too where the model is your own."
        said = f"If the initial weights are known, explain their change: --target change, {own}"
        return said if self.problem.start is None else ""

    @property
    def memory(self) -> str:
        """What takes less of it."""
        place = "" if self.problem.target.device.type == "cpu" else " (--device cpu)"
        return f"Audit where there is more memory{place}, or fewer parameters."

    def number(self, samples: int) -> str:
        """Ask for more samples."""
        left = "" if self.asked.samples is None else "leave the number out, or "
        return f"There may be more samples: {left}ask for {samples} (--samples {samples})."
