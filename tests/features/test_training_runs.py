"""The training run as a map: against torch's optimisers, finite differences, dense Jacobians."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from exhume.features import Linearization, replay
from exhume.features.replay import TrainingRun
from exhume.models.formulation import Known, replay_problem
from exhume.models.prepare import prepare
from exhume.recipes import Recipe

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


def small_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 3, 3, padding=1)
    layers = (convolution, nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.LayerNorm(48))
    return nn.Sequential(*layers, nn.Linear(48, 4)).to(dtype).eval()


def the_run(recipe: Recipe, dtype: torch.dtype = torch.float64) -> TrainingRun:
    network = prepare(small_net(dtype), (1, 4, 4)).network
    before = {name: w.clone() for name, w in network.module.state_dict().items()}
    after = {n: w + 0.01 if w.is_floating_point() else w for n, w in before.items()}
    features = replay_problem(network, before, after, Known(recipe)).features
    assert isinstance(features, TrainingRun)
    return features.to(torch.device("cpu"), dtype)


def inputs() -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_ends_where_torch_ends_and_its_products_are_derivatives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, x = RECIPES[name], inputs()
    run, model = the_run(recipe), small_net().train(recipe.norms == "train")
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    own = {"momentum": recipe.momentum, "nesterov": recipe.nesterov}
    options = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    trained = dict(model.named_parameters())
    optimizer = kinds[recipe.optimizer](
        trained.values(), **options | (own if recipe.optimizer == "sgd" else {})
    )
    batches = recipe.batches(3)
    losses = {
        "cross_entropy": lambda f, y: nn.functional.cross_entropy(
            f, y, label_smoothing=recipe.label_smoothing
        ),
        "mse": nn.functional.mse_loss,
    }
    for k, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(k, len(batches))
        optimizer.zero_grad()
        losses[recipe.loss](model(x[batch].view(-1, 1, 4, 4)), LABELS[batch]).backward()
        optimizer.step()
    change = torch.cat([(trained[n] - run.points[0][n]).flatten() for n in run.block]).detach()
    at = run.linearize(x)
    assert torch.allclose(at.combine(LABELS.view(-1, 1))[:, 0], change, rtol=1e-9, atol=1e-12)
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


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_rate_left_open_is_found_and_products_are_across_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, x, labels = RECIPES[name], inputs(), LABELS.view(-1, 1)
    run = the_run(recipe)
    end = run.begin()[0] + run.linearize(x).combine(labels)[:, 0]
    parts = torch.split(end, [run.points[0][name].numel() for name in run.block])
    after = {n: w.view_as(run.points[0][n]) for n, w in zip(run.block, parts, strict=True)}
    points = run.points[0], run.points[1] | after
    run = dataclasses.replace(run, points=points, recipe=dataclasses.replace(recipe, lr=None))
    at = run.linearize(x)
    assert torch.allclose(at.combine(labels)[:, 0], run.change, atol=1e-6)
    assert isinstance(at, replay.Replayed)
    assert at.recipe.lr == pytest.approx(recipe.lr, rel=1e-4)
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


def wide_run(recipe: Recipe, device: str) -> TrainingRun:
    """Return a run of a network whose weights are the most of what it takes."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 400), nn.GELU(), nn.Linear(400, 4))
    network = prepare(module, (16,), check=False).network
    before = {name: w.clone() for name, w in module.state_dict().items()}
    after = {name: w + 0.01 for name, w in before.items()}
    run = replay_problem(network, before, after, Known(recipe)).features
    assert isinstance(run, TrainingRun)
    return run.to(torch.device(device), torch.float32)


def products(run: TrainingRun) -> Linearization:
    """Simulate a run, and carry something back."""
    x, labels = inputs().to(run.device, run.dtype), LABELS.view(-1, 1).to(run.device)
    at = run.linearize(x)
    at.combine(labels)
    at.pull(torch.ones(run.width, 1, device=run.device), labels)
    return at


def peak(recipe: Recipe) -> int:
    """Return the most bytes that a run and its derivative take at once, on the CPU."""
    run, held, most = wide_run(recipe, "cpu"), 0, 0
    with torch.profiler.profile(profile_memory=True) as profiler:
        products(run)
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, held)
    return most


def test_memory_grows_as_the_root_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DENSE", 0)
    once, often = (peak(Recipe(lr=0.1, steps=steps)) for steps in (1, 100))
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
    for graph, eager in zip(*made, strict=True):
        assert torch.allclose(graph, eager, rtol=1e-3, atol=1e-5 * float(eager.abs().max()))
