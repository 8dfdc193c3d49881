"""The training run as a map: against torch's optimisers, finite differences, dense Jacobians."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.features import replay
from exhume.features.replay import TrainingRun
from exhume.models.formulation import Known
from exhume.recipes import Recipe
from exhume.testing import check_features
from replays import posed, trained

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPES = {
    "descent": Recipe(lr=0.3, steps=5),
    "momentum": Recipe(lr=0.1, steps=5, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "batches": Recipe(lr=0.2, epochs=3, batch_size=2, shuffle=3, schedule="cosine"),
    "smoothed": Recipe(lr=0.2, steps=4, warmup=2, label_smoothing=0.1),
    "milestones": Recipe(lr=0.2, steps=6, schedule="steps", milestones=(4,)),
    "adam": Recipe("adam", lr=0.01, steps=4, weight_decay=1e-2),
    "adamw": Recipe("adamw", lr=0.01, steps=4, weight_decay=0.1),
    "mse": Recipe(lr=0.3, steps=4, loss="mse"),
    "norms": Recipe(lr=0.3, steps=4, norms="train", batch_size=2),
}  # fmt: skip
LABELS = torch.eye(4, dtype=torch.float64)[[0, 1, 3]]


def the_run(recipe: Recipe, **told: Any) -> tuple[TrainingRun, Tensor]:
    """Return a run of a small network with what is told of it, and where torch brought it."""
    maps = nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU()
    model = nn.Sequential(*maps, nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 4))
    weights = trained(model, inputs().view(-1, 4, 4), LABELS, recipe)
    problem = posed(model, weights, Known(replace(recipe, **told)), (4, 4))
    assert isinstance(problem.features, TrainingRun)
    return problem.features, problem.target


@pytest.mark.parametrize("name", ["batches", "adam", "norms"])
def test_runs_are_checked_as_features_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = the_run(RECIPES[name])
    check_features(run, dim=16)
    for method, words in (("push", "not the derivative"), ("pull", "not the transpose")):
        right = getattr(replay.Replayed, method)
        with monkeypatch.context() as wrong:
            wrong.setattr(replay.Replayed, method, lambda *given, f=right: 1.001 * f(*given))
            with pytest.raises(AssertionError, match=words):
                check_features(run)


def inputs() -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_ends_where_torch_ends_and_its_products_are_derivatives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, (run, change) = inputs(), the_run(RECIPES[name])
    at = run.linearize(x)
    assert torch.allclose(at.combine(LABELS.view(-1, 1)), change, rtol=1e-9, atol=1e-12)
    direction, target = torch.randn_like(x), torch.randn(run.width, 1, dtype=torch.float64)
    moved = [run.linearize(x + e * direction).combine(LABELS.view(-1, 1)) for e in (1e-6, -1e-6)]
    monkeypatch.setattr(replay, "DENSE", 0)
    pushed, pulled = at.push(direction, LABELS), at.pull(target, LABELS)
    assert torch.allclose(pushed, (moved[0] - moved[1]) / 2e-6, rtol=1e-4, atol=1e-7)
    assert math.isclose(
        float((pushed * target).sum()), float((pulled * direction).sum()), rel_tol=1e-8
    )
    monkeypatch.undo()
    dense = run.linearize(x)
    dense.combine(LABELS.view(-1, 1))
    assert torch.allclose(dense.push(direction, LABELS), pushed)
    assert torch.allclose(dense.pull(target, LABELS), pulled)
    assert bool(run.undetermined) == (name == "norms")
    exact, probed = dense.curvature(LABELS).diagonal(), at.curvature(LABELS).diagonal()
    assert torch.all((probed / exact).log().abs() < math.log(4))


@pytest.mark.parametrize(
    ("name", "limit", "least"),
    [("momentum", "KEPT", 2), ("batches", "HELD", 9), ("adam", "HELD", 9)],
)
def test_a_run_that_is_not_kept_is_simulated_anew_for_the_same_products(
    name: str, limit: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "DENSE", 0)
    x, (run, _) = inputs() + 0.1, the_run(RECIPES[name])
    direction, target = torch.randn_like(x), torch.randn(run.width, 1, dtype=torch.float64)
    made = []
    for most in (getattr(replay, limit), least):
        monkeypatch.setattr(replay, limit, most)
        at = replace(run, keeps={}).linearize(x)
        at.combine(LABELS.view(-1, 1))
        assert isinstance(at, replay.Replayed) and at.short == (most > least)
        made.append((at.push(direction, LABELS), at.pull(target, LABELS)))
    for short, long in zip(*made, strict=True):
        assert torch.allclose(short, long)


def test_a_small_square_is_of_the_labels_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (run, _) = inputs(), the_run(RECIPES["descent"])
    at, direction = run.linearize(x), torch.randn_like(x)
    assert isinstance(at, replay.Replayed)
    for labels in (LABELS.view(-1, 1), LABELS.flip(0).view(-1, 1)):
        at.combine(labels)
        expected = at.pull(at.push(direction, labels), labels)
        assert torch.allclose(at.twice(direction), expected)
    for limit, least in (("SQUARED", {"cpu": 47}), ("DENSE", 0)):
        monkeypatch.setattr(replay, limit, least)
        other = run.linearize(x)
        other.combine(LABELS.view(-1, 1))
        assert isinstance(other, replay.Replayed) and other.twice(direction) is None
        monkeypatch.undo()


def test_a_jacobian_is_borrowed_from_a_run_nearby_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _ = the_run(RECIPES["descent"])
    labels, x = LABELS.view(-1, 1), inputs()
    here, nearby = (run.linearize(at) for at in (x, x + 0.1 * torch.randn_like(x)))
    assert isinstance(here, replay.Replayed) and isinstance(nearby, replay.Replayed)
    direction, target = torch.randn_like(x), torch.randn(run.width, 1, dtype=torch.float64)
    for at in (here, nearby):
        at.combine(labels)
    pushed, pulled = here.push(direction, labels), here.pull(target, labels)
    here.give_back()
    here.borrow(nearby)  # which has made none
    assert not here.borrowed and torch.allclose(here.push(direction, labels), pushed)
    other, square = nearby.push(direction, labels), nearby.twice(direction)
    here.borrow(nearby)
    assert here.borrowed and not torch.allclose(other, pushed)
    torch.testing.assert_close(here.push(direction, labels), other)
    torch.testing.assert_close(here.twice(direction), square)
    torch.testing.assert_close(here.pull(target, labels), pulled)  # slopes are its own
    here.give_back()
    torch.testing.assert_close(here.push(direction, labels), pushed)
    monkeypatch.setattr(replay, "SQUARED", {})
    nearby.combine(labels)
    assert nearby.push(direction, labels) is not None and nearby.twice(direction) is None
    here.borrow(nearby)  # J alone is of no use: products would not be symmetric
    assert not here.borrowed and torch.allclose(here.push(direction, labels), pushed)


# How a Jacobian is kept: whole, or since coordinates are few; else there are products alone
LIMITS = {"small": {}, "few": {"DENSE": 0}, "not": {"DENSE": 0, "COORDINATES": 0}}


@pytest.mark.parametrize("kept", LIMITS)
@pytest.mark.parametrize(
    ("name", "told"), [("momentum", {}), ("norms", {}), ("adam", {"lr": None})]
)
def test_products_in_a_span_are_those_of_the_run_for_what_lies_in_it(
    name: str, told: dict[str, Any], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = the_run(RECIPES[name], **told)
    rows = torch.linalg.qr(torch.randn(16, 5, dtype=torch.float64)).Q.T
    x, labels = inputs() @ rows.T @ rows, LABELS.view(-1, 1)
    direction = torch.randn(3, 5, dtype=torch.float64) @ rows
    target = torch.randn(run.width, 1, dtype=torch.float64)
    whole = run.linearize(x)
    change = whole.combine(labels)
    pushed, pulled = whole.push(direction, labels), whole.pull(target, labels) @ rows.T
    assert isinstance(whole, replay.Replayed) and whole.jacobian is not None
    apart = (whole.jacobian.view(-1, 3, 16) @ rows.T).transpose(0, 1).flatten(1)

    for limit, value in LIMITS[kept].items():
        monkeypatch.setattr(replay, limit, value)
    at = run.within(rows).linearize(x)
    assert torch.equal(at.combine(labels), change)
    assert torch.allclose(at.pull(target, labels) @ rows.T, pulled)  # before J is made, if it is
    assert torch.allclose(at.push(direction, labels), pushed)
    again = at.pull(target, labels)
    assert torch.allclose(again @ rows.T, pulled)
    assert isinstance(at, replay.Replayed)
    if kept == "not":
        assert at.jacobian is None
    else:
        assert at.jacobian is not None and at.jacobian.shape == (run.width, 15)
        assert torch.allclose(again @ rows.T @ rows, again)
        assert torch.allclose(at.twice(direction), at.pull(pushed, labels))
    exact, probed = apart @ apart.T / 5, at.curvature(labels)
    if kept == "small":
        assert torch.allclose(probed, exact)
    assert torch.all((probed.diagonal() / exact.diagonal()).log().abs() < math.log(4))


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_rate_left_open_is_found_and_products_are_across_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, labels, (run, change) = inputs(), LABELS.view(-1, 1), the_run(RECIPES[name], lr=None)
    at = run.linearize(x)
    assert torch.allclose(at.combine(labels), change, atol=1e-6)
    assert isinstance(at, replay.Replayed)
    assert at.recipe.lr == pytest.approx(RECIPES[name].lr, rel=1e-4)
    direction = torch.randn_like(x)
    moved = [run.linearize(x + e * direction).combine(labels) for e in (1e-5, -1e-5)]
    across = at._across((moved[0] - moved[1]) / 2e-5)
    assert torch.allclose(at.push(direction, labels), across, rtol=1e-3, atol=1e-5)
    dense = at.pull(across, labels)
    assert torch.allclose(dense, at.pull(across + 3 * at.along, labels))
    monkeypatch.setattr(replay, "DENSE", 0)
    same = run.linearize(x)
    same.combine(labels)
    assert torch.allclose(same.pull(across, labels), dense)
    assert torch.allclose(same.push(direction, labels), at.push(direction, labels))


def test_statistics_that_changed_contradict_norms_in_eval_mode() -> None:
    with pytest.raises(InputError, match=r"2\.running_mean changed in training"):
        the_run(RECIPES["norms"], norms="eval")


@pytest.mark.parametrize("name", ["descent", "adam"])
def test_many_sets_of_samples_are_run_at_a_rate_that_is_found(name: str) -> None:
    run, change = the_run(RECIPES[name], lr=None)
    ends = run.ends(torch.stack((inputs(), -inputs())), LABELS)
    assert torch.allclose(ends[0], change[:, 0], atol=1e-6)
    own = run.ends(inputs().repeat(2, 1, 1), torch.stack((LABELS, LABELS.roll(1, 0))))
    moved = run.ends(inputs().roll(-1, 0)[None], LABELS)[0]
    assert torch.allclose(own[0], ends[0]) and not torch.allclose(own[1], ends[0], atol=1e-6)
    assert run.recipe.lr is None or torch.allclose(own[1], moved)


def wide_run(recipe: Recipe, device: str) -> TrainingRun:
    """Return a run of a network whose weights are the most of what it takes."""
    module = nn.Sequential(nn.Linear(16, 400), nn.GELU(), nn.Linear(400, 4))
    before = {name: w.clone() for name, w in module.state_dict().items()}
    after = {name: w + 0.01 for name, w in before.items()}
    run = posed(module, (before, after), Known(recipe), (16,)).features
    assert isinstance(run, TrainingRun)
    return run.to(torch.device(device), torch.float32)


def products(run: TrainingRun) -> None:
    """Simulate a run, and carry something back."""
    x, labels = inputs().to(run.device, run.dtype), LABELS.view(-1, 1).to(run.device)
    at = run.linearize(x)
    at.combine(labels)
    at.pull(torch.ones(run.width, 1, device=run.device), labels)


def peak(recipe: Recipe) -> int:
    """Return the most bytes that a run and its derivative take at once, on the CPU."""
    run, held, most = wide_run(recipe, "cpu"), 0, 0
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        products(run)
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


def test_memory_grows_as_the_root_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DENSE", 0)
    once, often = (peak(Recipe(lr=0.1, steps=steps)) for steps in (1, 100))
    print(f"peak memory of 100 steps: {often / once:.1f} times that of one")  # for the docs
    assert 0 < often <= 12 * once


@needs_gpu
def test_memory_on_a_gpu() -> None:
    def taken(steps: int) -> int:
        run = wide_run(Recipe(lr=0.1, steps=steps), "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        products(run)
        return torch.cuda.max_memory_allocated() - before

    taken(1)  # what libraries keep for themselves
    assert taken(100) <= 12 * taken(1)


@needs_gpu
@pytest.mark.parametrize("lr", [0.1, None])
def test_graphs_give_what_eager_runs_do(lr: float | None) -> None:
    run = wide_run(Recipe(lr=lr, steps=7, momentum=0.9), "cuda")
    x, labels = inputs().to("cuda", torch.float32), LABELS.view(-1, 1).cuda()
    direction, target = torch.randn_like(x), torch.randn(run.width, 1, device="cuda")
    made = []
    for at in (run.linearize(x), replay.Replayed(run, x)):
        change = at.combine(labels)
        at.__dict__["jacobian"] = None
        made.append((change, at.push(direction, labels), at.pull(target, labels)))
    for rounding, graph, eager in zip((1e-5, 1e-3, 1e-3), *made, strict=True):
        assert torch.allclose(graph, eager, rtol=1e-3, atol=rounding * float(eager.abs().max()))
