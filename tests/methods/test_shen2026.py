"""Splitting inside the published methods: the books balance, and what was stuck comes loose."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exhume.auditing import run as run_folder
from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box
from exhume.equation.objective import fitted
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.activations import softplus
from exhume.features.dense import DenseGradients
from exhume.methods import METHODS, reconstruct
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import (
    Hyperparameters,
    Penalised,
    PenalisedState,
    balanced_labels,
    resting,
    terms_of,
)
from exhume.methods.progress import Progress, stream
from exhume.methods.shen2026 import (
    CountMatched,
    Penalty,
    Projection,
    Shen2026,
    base_for,
    curvatures,
    divided,
    loss_of,
    paced,
)
from exhume.search.split import halves
from nets import make
from problems import THREAT, case, gaussian

SMOOTH: dict[str, Any] = {
    "rate": 0.01,
    "multiplier_rate": 0.01,
    "scale": 1.0,
    "surrogate": lambda step: softplus(5.0),
}


def planted(
    outputs: int = 1,
    rule: Rule = Rule.MARGIN,
    samples: int = 4,
    activation: str = "relu",
    shape: tuple[int, ...] = (2, 3),
    seed: int = 0,
) -> Problem:
    """A target that is a combination of gradients at samples, so some candidates explain it."""
    net = make("mlp", outputs, seed, shape=list(shape), widths=[12, 9], activation=activation)
    names = tuple(name for name, _ in net.network.module.named_parameters())
    features = DenseGradients(net.network, (net.trained,), "gradients", block=names)
    x = 0.5 * gaussian(samples, features.dim, seed=seed + 1)
    labels = balanced_labels(samples, outputs)
    if rule is Rule.FREE:
        weights = gaussian(samples * outputs, 1, seed=seed + 2)
    else:
        rows = labels[:, None] if outputs == 1 else 2 * torch.eye(outputs)[labels] - 1
        weights = (0.5 * rows).double().reshape(-1, 1)
    target = features.linearize(x).combine(weights)
    premise = Premise.MARGIN if rule is Rule.MARGIN else Premise.CHANGE
    return Problem(target, features, THREAT, shape, Box(-1.0, 1.0), premise=premise)


def penalty(problem: Problem, settings: Hyperparameters, count: int, divisor: float) -> Penalty:
    """The loss of a recipe at candidates of which some lie outside of the box."""
    outputs = problem.features.network.outputs  # type: ignore[attr-defined]
    x = gaussian(count, problem.dim, seed=7)
    multipliers = 1 + gaussian(count, 1 if problem.rule is Rule.MARGIN else outputs, seed=8).abs()
    memory = {
        "multipliers": multipliers,
        "labels": balanced_labels(count, outputs),
        "shares": torch.rand(count, generator=stream(0, 9)).double(),
        "divisor": torch.tensor(divisor).double(),
        **resting(x, multipliers, settings.adam),
    }
    smooth = replace(problem, features=problem.features.substituted(settings.surrogate(0)))
    here = terms_of(smooth, settings, x, memory)
    return Penalty(smooth, settings, PenalisedState(fit=here.fit, memory=memory), here)


CASES = {
    "margin": (planted(), Hyperparameters(**SMOOTH, least=3.0, floor=5.0)),
    "margin of several": (planted(3), Hyperparameters(**SMOOTH, least=3.0, floor=5.0)),
    "free": (planted(2, Rule.FREE), Hyperparameters(**SMOOTH, adam=True)),
    "free and smooth": (
        planted(1, Rule.FREE),
        Hyperparameters(**SMOOTH, box=0.3, smoothness=0.2, sparsity=0.1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_decrease_is_that_of_the_methods_own_loss(name: str) -> None:
    loss = penalty(*CASES[name], count=4, divisor=4.0)
    pairs = curvatures(loss, loss.problem.dim, stream(0, 0))
    chosen, epsilon = torch.tensor([0, 1, 3]), 1e-3
    still = loss.after(halves(loss.candidates, chosen, pairs.vectors, 0.0), chosen)
    assert still == pytest.approx(loss.value, rel=1e-13)
    moved = loss.after(halves(loss.candidates, chosen, pairs.vectors, epsilon), chosen)
    predicted = 0.5 * epsilon**2 * float(pairs.values[chosen].sum())
    assert moved - loss.value == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("forget", [True, False])
@pytest.mark.parametrize("name", ["margin", "free"])
def test_a_split_of_no_distance_changes_no_loss(name: str, forget: bool) -> None:
    loss = penalty(*CASES[name], count=4, divisor=8.0)
    memory = loss.state.memory
    memory["velocity.candidates"] = gaussian(4, loss.problem.dim)
    memory["velocity.multipliers"] = gaussian(*memory["multipliers"].shape)
    chosen = torch.tensor([1, 2])
    still = halves(loss.candidates, chosen, torch.zeros_like(loss.candidates), 0.0)
    state = loss.split(still, chosen, forget)
    after = terms_of(loss.problem, loss.settings, state.fit.candidates, state.memory)
    assert after.value == pytest.approx(loss.value, rel=1e-13)
    assert state.memory["divisor"].item() == 8.0
    assert state.memory["labels"][4:].tolist() == memory["labels"][chosen].tolist()
    for key in ("velocity.candidates", "velocity.multipliers"):
        assert len(state.memory[key]) == 6 and bool(state.memory[key].any()) != forget
    if not forget:  # the sum of the halves goes on as their parent did
        velocity = state.memory["velocity.multipliers"]
        assert torch.allclose(velocity[1] + velocity[4], memory["velocity.multipliers"][1])
        carried = state.memory["velocity.candidates"]
        assert torch.equal(carried[4:], memory["velocity.candidates"][chosen])


def test_the_projection_predicts_what_halves_with_half_the_coefficients_do() -> None:
    known = case(6, 5, 6.0, "tanh", outputs=2)
    progress = Iurada2025(rate=1e-3).init(known.problem, 3, 0)
    start = known.problem.domain.project(progress.state.fit.candidates)
    state = replace(progress.state, fit=fitted(known.problem, start))
    loss = Projection.of(known.problem, replace(progress, state=state))
    pairs = curvatures(loss, 6, stream(0, 0))
    chosen, epsilon = torch.tensor([0, 2]), 1e-3
    moved = known.problem.domain.project(halves(loss.candidates, chosen, pairs.vectors, epsilon))
    coefficients = state.fit.coefficients.clone()
    coefficients[chosen] /= 2
    combined = known.problem.features.linearize(moved).combine(
        torch.cat([coefficients, coefficients[chosen]])
    )
    target = known.problem.target
    held = float((target - combined).square().sum() / target.square().sum())
    predicted = 0.5 * epsilon**2 * float(pairs.values[chosen].sum())
    assert held - loss.value == pytest.approx(predicted, rel=2e-3)
    assert loss.after(moved, chosen) < held


def test_relu_is_smoothed_where_the_base_method_does_not() -> None:
    known = case(6, 5, 6.0, "relu")
    base = Iurada2025(rate=1e-3)
    problem = base.view(known.problem)
    loss = Projection.of(problem, base.init(problem, 3, 0))
    assert curvatures(loss, 6, stream(0, 0)).values.min() < 0


def haim(steps: int = 400, **changes: Any) -> Haim2022:
    settings = {"rate": 0.05, "scale": 0.3, "least": 0.05, "sharpness": 20.0} | changes
    return Haim2022(steps=steps, multiplier_rate=0.05, **settings)


BASES: dict[str, tuple[Problem, Penalised | Iurada2025]] = {
    "haim2022": (planted(samples=6), haim(800)),
    "iurada2025": (case(8, 6, 6.0, "relu+tanh").problem, Iurada2025(rate=1.0, steps=800)),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [("haim2022", "published"), ("haim2022", "adaptive"), ("iurada2025", "adaptive")],
)
def test_a_run_with_splits(name: str, rule: Any) -> None:
    problem, base = BASES[name]
    method = Shen2026(base, every=200, rule=rule)
    seen: list[Progress] = []
    found = reconstruct(problem, 2, 0, method, observe=lambda progress, _: seen.append(progress))
    counts = [len(progress.state.fit.candidates) for progress in seen]
    assert counts[-1] > counts[0] and sorted(counts) == counts
    assert len(found.samples) == counts[-1]
    assert seen[-1].memory["looks"].item() == 6
    problem = method.view(problem)
    for before, after in itertools.pairwise(seen):
        rows, parents = len(after.state.fit.candidates), after.memory["parents"]
        assert len(parents) == rows
        if name == "iurada2025":
            continue
        memory, start = after.state.memory, counts[0]
        total = torch.zeros(start, dtype=torch.float64).index_add(0, parents, memory["shares"])
        assert torch.allclose(total, torch.ones_like(total))
        assert torch.equal(memory["labels"], seen[0].state.memory["labels"][parents])
        assert memory["divisor"].item() == start
        if rows > len(before.state.fit.candidates):
            assert before.state.steps == after.state.steps >= 200
            assert loss_of(base, problem, after).value < loss_of(base, problem, before).value


def test_splits_come_at_multiples() -> None:
    problem, base = BASES["haim2022"]
    steps: list[tuple[int, int]] = []

    def note(progress: Progress, _: float) -> None:
        steps.append((progress.state.steps, int(progress.memory["looks"].item())))

    reconstruct(problem, 2, 0, Shen2026(base, rounds=2), observe=note)
    changes = [after for before, after in itertools.pairwise(steps) if after[1] > before[1]]
    assert changes == [(140, 1), (270, 2), (400, 3), (540, 4)]  # halves of 800/3 steps


@pytest.mark.parametrize("rule", ["published", "adaptive"])
def test_too_few_candidates_come_loose(rule: Any) -> None:
    """Four samples, two candidates: only splitting can explain them."""
    problem = planted(samples=4, activation="tanh")
    base = haim(600, rate=0.05)
    alone = reconstruct(problem, 1, 0, base)
    split = reconstruct(problem, 1, 0, Shen2026(base, every=150, rule=rule))
    assert len(alone.samples) == 2 and len(split.samples) >= 4
    assert split.residual < 0.5 * alone.residual


def test_more_shares_make_smaller_steps_of_the_multipliers() -> None:
    problem, base = BASES["haim2022"]
    progress = base.init(problem, 2, 0)
    memory = progress.state.memory | {"shares": torch.tensor([1.0, 0.25, 0.5, 1.0]).double()}
    progress = replace(progress, state=replace(progress.state, memory=memory))
    slower = paced(base, problem, progress)
    assert isinstance(slower, Haim2022) and isinstance(base, Haim2022)
    assert slower.multiplier_rate == 0.25 * base.multiplier_rate
    assert replace(slower, multiplier_rate=base.multiplier_rate) == base
    momentum = BASES["iurada2025"][1]
    assert paced(momentum, problem, progress) is momentum


def test_the_control_has_as_many_candidates() -> None:
    problem, _ = BASES["haim2022"]
    found = reconstruct(problem, 2, 0, CountMatched(haim(20), 7))
    assert len(found.samples) == 7 and found.method == "count-matched"
    projected, momentum = BASES["iurada2025"]
    control = CountMatched(replace(momentum, steps=5), 7)  # type: ignore[arg-type]
    assert len(reconstruct(projected, 2, 0, control).samples) == 7


@pytest.mark.parametrize("name", BASES)
def test_an_interrupted_run_goes_on_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a run folder, between two splits."""
    problem, base = BASES[name]
    method = Shen2026(base, every=200, rule="adaptive")
    monkeypatch.setitem(METHODS, "shen2026", lambda: method)
    monkeypatch.setattr(run_folder, "EVENT_SECONDS", 0.0)
    asked, opened = run_folder.Settings(None, 2, method="shen2026"), run_folder.Opened(problem)
    whole, _ = run_folder.run(asked, opened, tmp_path / "whole")

    def interrupt(event: run_folder.Event) -> None:
        if event.step >= 350:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_folder.run(asked, opened, tmp_path / "half", show=interrupt)
    again, _ = run_folder.run(asked, opened, tmp_path / "half", resume=True)
    assert len(again.samples) > 2 and torch.equal(again.samples, whole.samples)
    assert (again.steps, again.products) == (whole.steps, whole.products)


def test_tuning_comes_before_splitting() -> None:
    problem, _ = BASES["haim2022"]
    base = Haim2022(steps=60, trials=2, probe=10)
    phases: list[tuple[str, bool]] = []

    def note(progress: Progress, _: float) -> None:
        phases.append((progress.phase, "parents" in progress.memory))

    reconstruct(problem, 2, 0, Shen2026(base), observe=note)
    assert ("tune", False) in phases and ("run", True) in phases
    assert ("tune", True) not in phases


def test_the_base_follows_from_the_problem() -> None:
    assert isinstance(base_for(planted()), Haim2022)
    assert isinstance(base_for(planted(3)), Buzaglo2023)
    assert isinstance(base_for(planted(rule=Rule.FREE)), Loo2023)
    held = replace(planted(), premise=Premise.DECAY)
    assert isinstance(base_for(held), Buzaglo2023)
    assert isinstance(base_for(case(6, 3, 4.0).problem), Iurada2025)
    assert isinstance(METHODS["shen2026"](), Shen2026)


def test_memory_that_is_not_of_candidates_stays() -> None:
    memory = {"clock": torch.tensor(3), "multipliers": torch.ones(2, 1)}
    after = divided(memory, torch.tensor([1]))
    assert after["clock"] is memory["clock"] and after["multipliers"].tolist() == [
        [1],
        [0.5],
        [0.5],
    ]
    assert memory["multipliers"].tolist() == [[1], [1]]


@pytest.mark.parametrize(
    "settings", [{"rule": "greedy"}, {"every": 0}, {"rounds": -1}, {"iterations": 0}], ids=str
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        Shen2026(**settings)


def test_the_projection_is_for_free_coefficients() -> None:
    with pytest.raises(InputError, match="iurada2025 where coefficients are free"):
        reconstruct(planted(), 2, 0, Shen2026(Iurada2025()))
