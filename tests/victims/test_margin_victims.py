"""Networks trained to the margin or held by decay: what the record says, by autograd and scipy."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from exhume import data, victims
from exhume.data import Data
from exhume.errors import InputError
from exhume.models.folder import read_model, read_network
from exhume.victims import Victim, margin
from exhume.victims.margin import ToRest

PARITY, FOUR = (data.load("digits", n, classes="parity", centre="pixels") for n in (10, 4))
CLASSES = data.load("digits", 9, 0, classes=(1, 4, 7), centre="pixels")
HELD = {"decay": 1e-2, "steps": 800}
KINDS: dict[str, tuple[Data, dict[str, Any]]] = {
    "margin": (PARITY, {}),
    "deep": (PARITY, {"widths": (30, 20)}),
    "classes": (CLASSES, {}),
    "decay": (PARITY, HELD),
    "squared": (PARITY, {**HELD, "loss": "squared"}),
    "decay of classes": (CLASSES, HELD),
    "logistic of classes": (CLASSES, {**HELD, "loss": "logistic"}),
}


def made(known: Data = FOUR, **options: Any) -> Victim:
    sizes = {"widths": (40,), "steps": 400, "dtype": torch.float64} | options
    return victims.kkt_mlp(known, **sizes)


Watched = tuple[Victim, list[list[Tensor]]]  # with its weights before each of the last steps


@pytest.fixture(scope="module", params=KINDS)
def watched(request: pytest.FixtureRequest) -> Watched:
    known, options = KINDS[request.param]
    path: list[list[Tensor]] = []
    step = margin._Rest.step

    def moved(self: Any, gradient: Any, rate: float) -> None:
        path.append([w.detach().clone() for w in self.weights])
        step(self, gradient, rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(margin._Rest, "step", moved)
        victim = made(known, **options)
    assert len(path) == victim.training["steps"]
    return victim, path[-(options.get("steps", 400) // 10) :]


def plain(layers: list[Tensor], x: Tensor) -> Tensor:
    """W_L relu(… relu(W₁x + b₁)), from W₁, b₁, W₂, …"""
    h = x @ layers[0].T + layers[1]
    for weight in layers[2:]:
        h = torch.relu(h) @ weight.T
    return h


def leaves(weights: Iterable[Tensor]) -> list[Tensor]:
    return [w.double().clone().requires_grad_() for w in weights]


def flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts])


def signs_of(known: Data) -> Tensor:
    return torch.where(known.targets > 0, 1.0, -1.0).double()


def loss_of(name: str, outputs: Tensor, known: Data) -> Tensor:
    return {
        "squared": lambda: nn.functional.mse_loss(outputs, known.targets),
        "logistic": lambda: torch.log1p(torch.exp(-signs_of(known) * outputs)).mean(),
        "cross_entropy": lambda: nn.functional.cross_entropy(outputs, known.targets.argmax(1)),
    }[name]()


def test_every_sample_is_fitted_and_the_margins_are_those_of_the_record(watched: Watched) -> None:
    record, known = watched[0].training, watched[0].truth
    outputs, signs = plain(list(watched[0].trained.values()), known.inputs), signs_of(known)
    loss = loss_of(record["loss_name"], outputs, known)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6) and loss < 0.1
    if known.outputs == 1:
        assert torch.equal(outputs.sign(), signs)
    else:
        assert torch.equal(outputs.argmax(1), known.targets.argmax(1))
    found = (signs * outputs).amin(1)
    if record["loss_name"] == "cross_entropy":
        found = outputs.topk(2).values @ torch.tensor([1.0, -1.0]).double()
    expected = None if record["loss_name"] == "squared" else [found.min(), found.max()]
    assert record.get("margins") == (expected and pytest.approx(list(map(float, expected)), 1e-9))


def test_the_stationarity_of_the_record(watched: Watched) -> None:
    """1 − cos² of θ and the mean of −∇L, or −∇ log L, over the last tenth of the steps."""
    (victim, last), record, slopes = watched, watched[0].training, []
    for weights in last:
        at = leaves(weights)
        loss = loss_of(record["loss_name"], plain(at, victim.truth.inputs), victim.truth)
        loss = loss.log() if record["decay"] is None else loss
        slopes.append(-flat(torch.autograd.grad(loss, at)))
    theta, mean = flat(victim.trained.values()), torch.stack(slopes).mean(0)
    cosine, alone = (torch.cosine_similarity(theta, x, 0).item() for x in (mean, slopes[-1]))
    assert record["stationarity"] == pytest.approx(1 - cosine**2, rel=1e-6, abs=1e-12)
    assert record["stationarity"] < min(5e-3, 1 - alone**2)  # kinks are found by the mean alone
    assert cosine > 0
    if record["decay"] is not None:  # θ = −∇L/decay, in size too
        rest = mean / record["decay"]
        assert (rest - theta).norm() / theta.norm() < 3 * math.sqrt(record["stationarity"]) + 1e-2
        assert rest.norm().item() == pytest.approx(theta.norm().item(), rel=2e-2)


def test_the_violation_of_the_record(watched: Watched) -> None:
    """‖θ − Σ A ∇f‖²/‖θ‖² for the best A that the premise allows, by scipy or least squares."""
    victim, layers = watched[0], leaves(watched[0].trained.values())
    outputs, theta = plain(layers, victim.truth.inputs), flat(layers)
    n, c = outputs.shape
    slopes = [torch.autograd.grad(f, layers, retain_graph=True) for f in outputs.flatten()]
    rows = torch.stack([flat(parts) for parts in slopes]).reshape(n, c, -1)  # ∇θ f_c(x_i)
    if victim.training["premise"] == "decay":
        basis = rows.flatten(0, 1).T
        left = theta - basis @ torch.linalg.lstsq(basis, theta[:, None]).solution[:, 0]
        size, active = left.square().sum().item(), n
    else:
        own = victim.truth.targets.argmax(1).tolist()
        pairs = [rows[i, y] - rows[i, k] for i, y in enumerate(own) for k in range(c) if k != y]
        allowed = torch.stack(pairs) if c > 1 else signs_of(victim.truth) * rows[:, 0]
        multipliers, least = nnls(allowed.T.numpy(), theta.numpy())
        sizes = multipliers.reshape(n, -1).sum(1)
        size, active = least**2, int((sizes > 1e-3 * sizes.max()).sum())
    expected = size / float(theta.square().sum())
    assert victim.training["violation"] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert 1e-6 < expected < 0.2 and victim.training["active"] == active


def test_networks_are_read_as_they_were_written(watched: Watched, tmp_path: Path) -> None:
    victim = watched[0]
    victim.save(tmp_path / "model")
    back, problem = read_network(tmp_path / "model"), read_model(tmp_path / "model")
    outputs = plain(list(victim.trained.values()), victim.truth.inputs)
    torch.testing.assert_close(back.network(back.trained, victim.truth.inputs), outputs)
    for name, w in victim.trained.items():
        assert torch.equal(back.trained[name], w)
        assert torch.equal(back.initial[name], victim.initial[name])
    assert problem.premise is victim.problem.premise
    assert torch.equal(problem.target, victim.problem.target)
    whole = flat(victim.trained.values())[:, None]
    for word, target in (
        ("margin", whole),
        ("decay", whole),
        ("change", (w - back.initial[name]).T),
    ):
        posed = victim.posed(premise=word)
        assert posed.premise.value == word and torch.equal(posed.target, target)
    with pytest.raises(InputError, match="premise"):
        victim.posed(premise="margins")


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize(
    ("least", "ratio"), [(9.21, 1.0), (9.3, 9.21 / 9.3), (20.0, 0.0), (1.0, 9.21)]
)
def test_shrinking_is_exact_and_slow(least: float, ratio: float, depth: int) -> None:
    """s^L = wanted over least for L layers, no more than a fiftieth a layer."""
    factor = min(max(ratio ** (1 / depth), 0.98), 1.02)
    hidden = [nn.Linear(5, 5, bias=False)] * (depth - 2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), *hidden, nn.Linear(5, 1, bias=False))
    run = margin._Rest(net.double(), FOUR, "logistic", ToRest(level=math.exp(-9.21)))
    run.step([torch.ones_like(w) for w in run.weights], 1e-3)
    before = [tensor.detach().clone() for tensor in run.live]
    run._shrink(run.labels * torch.tensor([[least], [30.0], [25.0], [least + 1]]).double())
    for old, new in zip(before, run.live, strict=True):  # the velocity too
        torch.testing.assert_close(new.detach(), factor * old)


def test_the_start_is_the_published_one_and_the_end_at_the_least_margin() -> None:
    initial = made(widths=(300, 50), small=1e-2, steps=2).initial
    sizes = (("1.weight", 1e-2, 0.03), ("1.bias", 1e-2, 0.2), ("3.weight", 1 / 30, 0.03))
    for name, size, within in sizes:
        assert initial[name].std().item() == pytest.approx(size, rel=within)
    assert initial["3.weight"].abs().max() <= 1 / math.sqrt(300)
    for level in (1e-2, 1e-6):
        least = made(level=level).training["margins"][0]
        assert least == pytest.approx(-math.log(level), rel=0.05)


def test_a_seed_means_the_same_weights_in_either_precision() -> None:
    seen: list[tuple[int, float]] = []

    def train(seed: int, state: int, dtype: torch.dtype = torch.float64) -> Victim:
        torch.manual_seed(state)
        return made(seed=seed, steps=60, dtype=dtype, show=lambda *now: seen.append(now))

    one, again, other = train(3, 0), train(3, 1), train(4, 0)
    rounded = train(3, 0, torch.float32).trained
    assert [step for step, _ in seen[:4]] == [0, 20, 40, 60]
    assert seen[0][1] == pytest.approx(math.log(2), abs=1e-3)
    for name, w in one.trained.items():
        assert torch.equal(w, again.trained[name]) and not torch.equal(w, other.trained[name])
        assert torch.equal(one.initial[name], again.initial[name])
        assert rounded[name].dtype == torch.float32
        torch.testing.assert_close(rounded[name].double(), w, rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"decay": 1e-2}], ids=["margin", "decay"])
def test_steps_that_diverge_are_undone(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(margin, "STABLE", 200.0)
    monkeypatch.setattr(margin, "LARGEST_STEP", 200.0)
    undone: list[float] = []
    go_back = margin._Rest._go_back

    def noted(self: Any) -> None:
        go_back(self)
        undone.append(self.caution)
        for weight, kept, velocity in zip(self.weights, self.kept, self.moments[0], strict=True):
            assert torch.equal(weight, kept) and not velocity.any()

    monkeypatch.setattr(margin._Rest, "_go_back", noted)
    trained = made(steps=600, **options).trained.values()
    assert undone and undone == [0.5 ** (i + 1) for i in range(len(undone))]
    assert torch.equal(plain(list(trained), FOUR.inputs).sign(), signs_of(FOUR))
    monkeypatch.undo()
    monkeypatch.setattr(margin, "WILD", 1e-9)  # no step is ever small enough
    with pytest.raises(InputError, match="however small the steps"):
        made(**options)


TWICE = replace(FOUR, inputs=FOUR.inputs[:1].expand(4, -1).clone())
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": "squared"}, "1 outputs at the margin take logistic, got 'squared'"),
    ({"loss": "cross_entropy", "decay": 1.0}, "take logistic or squared"),
    ({"known": CLASSES, "loss": "logistic"}, "3 outputs at the margin take cross_entropy"),
    ({"loss": "hinge", "decay": 1.0}, "hinge"),
    ({"decay": 0.0}, "decay: expected a number above 0"),
    ({"decay": math.nan}, "decay: expected a number above 0"),
    ({"level": 1.0}, "level: expected a number between 0 and 1"),
    ({"level": 0.0}, "level: expected a number between 0 and 1"),
    ({"widths": ()}, "widths"),
    ({"device": "abacus"}, "abacus"),
    ({"small": math.nan}, "not finite"),
    ({"known": TWICE, "steps": 5}, "not fitted after.*wider layers"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        made(**options)
