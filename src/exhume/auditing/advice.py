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
RECIPE = "If you know how it was trained, replay it: --premise replay --recipe FILE."
START = (
    "If the initial weights are known, explain their change: --target change, and --initial FILE "
    "too where the model is your own."
)


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
    if change and problem.first_layer is not None and found.rank is None:
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


def more(samples: int, asked: Asked) -> str:
    """Ask for more samples."""
    left = "" if asked.samples is None else "leave the number out, or "
    return f"There may be more samples: {left}ask for {samples} (--samples {samples})."
