"""Published settings by name: methods with which nothing is tuned, at their published length."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods import buzaglo2023, haim2022, loo2023
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.loo2023 import Loo2023
from exhume.methods.progress import Method
from exhume.methods.shen2026 import Shen2026

# Settings of good published runs, by name. shen2026 interrupts one of the others, so has theirs.
PRESETS: dict[str, Mapping[str, Mapping[str, float]]] = {
    "haim2022": haim2022.PUBLISHED,
    "buzaglo2023": buzaglo2023.PUBLISHED,
    "loo2023": loo2023.PUBLISHED,
    "shen2026": buzaglo2023.PUBLISHED,
}
RECIPES: dict[str, type[Haim2022] | type[Loo2023]] = {
    "haim2022": Haim2022,
    "buzaglo2023": Buzaglo2023,
    "loo2023": Loo2023,
}
EVERY, STEPS = 50_000, 200_000  # published for shen2026: between two splits, and in all


def presets(method: str) -> tuple[str, ...]:
    """Return the names of a method's published runs, whose settings `preset` gives; often none.

    Example:
        >>> presets("haim2022")
        ('b9', 'k60', 'kcf9', 'rbij')
    """
    return tuple(PRESETS.get(method, ()))


def preset(method: str, name: str, problem: Problem | None = None) -> Method:
    """Return a method with the settings and the length of a published run: nothing is tuned.

    b9 and k60 are for CIFAR-10 with one output, kcf9 and rbij for MNIST, classes1 and classes2 for
    several classes, decay1 and decay2 for weight decay. With a problem, one for another is refused.

    Example:
        >>> preset("haim2022", "b9").rate
        0.5549
    """
    if name not in (known := presets(method)):
        has = f"has {', '.join(known)}" if known else f"has none; {', '.join(PRESETS)} have"
        raise InputError(f"preset: {method} {has}, got {name!r}.")
    values = PRESETS[method]
    other: type[Haim2022] = Haim2022 if name in haim2022.PUBLISHED else Buzaglo2023
    given: dict[str, Any] = dict(values[name])
    chosen = RECIPES.get(method, other)(**given)
    if problem is not None:
        chosen.check(problem)
        fits = [other for other, given in values.items() if given in chosen.sweep(problem)[1]]
        if name not in fits:
            raise InputError(f"preset: {name} is not for such weights; take {' or '.join(fits)}.")
    return Shen2026(replace(chosen, steps=STEPS), EVERY) if method == "shen2026" else chosen
