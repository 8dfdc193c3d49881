"""KKT points: nets trained to the margin or held by decay, by autograd and scipy; exact ones."""

import json
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.func import functional_call

from commands import exhume_
from exhume import data, victims
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth
from exhume.files import read_tensors
from exhume.models.folder import read_model, read_network
from exhume.victims import Victim, margin
from problems import kkt_point, refusals

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


def flat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts])


def gradients(outputs: Tensor, weights: list[Tensor]) -> Tensor:
    slopes = (torch.autograd.grad(f, weights, retain_graph=True) for f in outputs.flatten())
    return torch.stack([flat(parts) for parts in slopes])


def signs_of(known: Data) -> Tensor:
    return torch.where(known.targets > 0, 1.0, -1.0).double()


def loss_of(name: str, outputs: Tensor, known: Data) -> Tensor:
    if name == "logistic":
        return torch.log1p(torch.exp(-signs_of(known) * outputs)).mean()
    own = {"squared": nn.functional.mse_loss, "cross_entropy": nn.functional.cross_entropy}[name]
    return own(outputs, known.targets)


def test_every_sample_is_fitted_and_the_margins_are_those_of_the_record(watched: Watched) -> None:
    record, known = watched[0].training, watched[0].truth
    outputs, signs = plain(list(watched[0].trained.values()), known.inputs), signs_of(known)
    loss = loss_of(record["loss_name"], outputs, known)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6) and loss < 0.1
    assert torch.equal(outputs.sign(), signs) or known.outputs > 1
    assert torch.equal(outputs.argmax(1), known.targets.argmax(1))
    found = (signs * outputs).amin(1)
    if record["loss_name"] == "cross_entropy":
        found = outputs.topk(2).values @ torch.tensor([1.0, -1.0]).double()
    expected = pytest.approx([found.min().item(), found.max().item()], 1e-9)
    assert record.get("margins") == (None if record["loss_name"] == "squared" else expected)


def test_the_stationarity_of_the_record(watched: Watched) -> None:
    """1 − cos² of θ and the mean of −∇L, or −∇ log L, over the last tenth of the steps."""
    (victim, last), record, slopes = watched, watched[0].training, []
    for weights in last:
        at = [w.clone().requires_grad_() for w in weights]
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
    victim = watched[0]
    layers = [w.clone().requires_grad_() for w in victim.trained.values()]
    outputs, theta = plain(layers, victim.truth.inputs), flat(layers)
    n, c = outputs.shape
    rows = gradients(outputs, layers).reshape(n, c, -1)  # ∇θ f_c(x_i)
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
    targets = {"margin": whole, "decay": whole, "change": (w - back.initial[name]).T}
    for word, target in targets.items():
        posed = victim.posed(premise=word)
        assert posed.premise.value == word and torch.equal(posed.target, target)
    with pytest.raises(InputError, match="premise"):
        victim.posed(premise="margins")


@pytest.mark.parametrize("known", [PARITY, CLASSES], ids=["margin", "classes"])
def test_gradient_flow(known: Data) -> None:
    """The end is that of SGD with small steps; the record says what of the start is left."""
    asked: Any = {"widths": (20, 20), "small": 0.3, "dtype": torch.float64, "until": 9e-2}
    victim = victims.kkt_mlp(known, training="flow", **asked)
    record, trained, initial = victim.training, victim.trained, victim.initial
    layers = [w.clone().requires_grad_() for w in initial.values()]
    descent, time = torch.optim.SGD(layers, lr=1e-2), 0.0
    while time < record["time"]:
        descent.zero_grad()
        loss = loss_of(record["loss_name"], plain(layers, known.inputs), known)
        loss.backward()
        descent.step()
        time += 1e-2
    change = flat(trained.values()) - flat(initial.values())
    off = flat(layers) - flat(trained.values())
    assert off.norm() < 0.03 * change.norm() and record["risen"] == 0
    assert 0.7 * 9e-2 < record["loss"] <= 9e-2
    assert [record[word] for word in ("training", "premise", "decay")] == ["flow", "margin", None]
    whole, moved = (victim.posed(premise="margin", target=x) for x in ("weights", "change"))
    sizes = {name: w.square().sum().item() for name, w in trained.items()}
    steps = {name: (w - initial[name]).square().sum().item() for name, w in trained.items()}
    for word, each, problem in (("residual", sizes, whole), ("change", steps, moved)):
        left = sum(record["layers"][name][word] * size for name, size in each.items())
        share = residual_at_truth(problem, known)
        assert left / sum(each.values()) == pytest.approx(share, rel=1e-6)
    w, start = trained["3.weight"], initial["3.weight"]
    own, along = record["layers"]["3.weight"], (w * start).sum() / start.square().sum()
    assert own["left"] == pytest.approx(along.item()) and 0.5 < own["left"] < 1.5
    cosine = torch.cosine_similarity(w.flatten(), start.flatten(), 0)
    assert own["start"] == pytest.approx(cosine.item() ** 2)


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
    seen = list[tuple[int, float]]()

    def train(seed: int, dtype: torch.dtype = torch.float64) -> Victim:
        torch.randn(1)  # the state of others' random numbers plays no part
        return made(seed=seed, steps=60, dtype=dtype, show=lambda *now: seen.append(now))

    one, again, other, rounded = train(3), train(3), train(4), train(3, torch.float32).trained
    assert [step for step, _ in seen[:4]] == [0, 20, 40, 60]
    assert seen[0][1] == pytest.approx(math.log(2), abs=1e-3)
    for name, w in one.trained.items():
        assert torch.equal(w, again.trained[name]) and not torch.equal(w, other.trained[name])
        assert torch.equal(one.initial[name], again.initial[name])
        assert rounded[name].dtype == torch.float32
        torch.testing.assert_close(rounded[name].double(), w, rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"decay": 1e-2}], ids=["margin", "decay"])
def test_steps_that_diverge_are_undone(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
test_what_is_refused = refusals(
    ({"loss": "squared"}, "1 outputs at the margin take logistic, got 'squared'"),
    ({"loss": "cross_entropy", "decay": 1.0}, "take logistic or squared"),
    ({"known": CLASSES, "loss": "logistic"}, "3 outputs at the margin take cross_entropy"),
    ({"loss": "hinge", "decay": 1.0}, "hinge"),
    *(({"decay": bad}, "decay: expected a number above 0") for bad in (0.0, math.nan)),
    *(({"level": bad}, "level: expected a number between 0 and 1") for bad in (0.0, 1.0)),
    ({"widths": ()}, "widths"),
    ({"device": "abacus"}, "abacus"),
    ({"small": math.nan}, "not finite"),
    ({"known": TWICE, "steps": 5}, "not fitted after.*wider layers"),
    ({"training": "adam"}, "training: expected one of flow, rest"),
    ({"training": "flow", "steps": 3}, "not 3e-06, after 3 steps along the flow.*more steps"),
    ({"training": "flow", "small": math.nan}, "a loss of nan, not 3e-06, after 0 steps"),
    ({"training": "flow", "decay": 1.0}, "decay: training flow takes loss, small, until, steps"),
    ({"training": "flow", "loss": "squared"}, "1 outputs along the flow take logistic"),
    ({"until": 1e-3}, "until: training rest takes loss, decay, small, level, steps"),
    call=made,
)


@pytest.mark.parametrize(("degree", "width"), [(3, 4), (3, 16), (4, 24), (5, 12)])
def test_a_kkt_point_is_one(degree: int, width: int) -> None:
    known = kkt_point().truth
    if degree > 3:
        every = victims.labellings(data.sphere(9, 3, 2), degree)
        rows = {tuple(one.targets[:, 0].tolist()) for one in every}
        assert len(every) == len(rows) == 4 and all(row[0] == 1 for row in rows)
        known = every[0]
    made = victims.polynomial(known, width, degree)
    theta = {name: w.clone().requires_grad_() for name, w in made.trained.items()}
    f = functional_call(made.model.network.module, theta, (known.inputs,))[:, 0]
    matrix, whole = gradients(f, list(theta.values())).T, flat(made.trained.values())
    b = torch.linalg.lstsq(matrix, whole[:, None]).solution[:, 0]
    assert (matrix @ b - whole).norm() < 1e-10 * whole.norm()
    labels = known.targets[:, 0]
    assert made.training["violation"] < 1e-10 and (b * labels > 0).all()
    assert torch.allclose(labels * f, torch.ones_like(f), atol=1e-10)
    assert made.training["margins"] == pytest.approx([1.0] * known.samples)
    assert made.training["active"] == list(range(known.samples))
    assert len(made.trained["1.weight"]) == width
    assert residual_at_truth(made.problem, made.truth) < 1e-20 and made.problem.drift == 0
    assert "KKT" in made.problem.threat_model.assumes[0]
    first, last = made.trained["1.weight"], made.trained["3.weight"][0]
    assert torch.allclose(first.square().sum(1), degree * last.square())  # balanced


def beyond(known: Data, factor: float) -> Data:
    inputs = torch.cat([known.inputs, factor * known.inputs[:1]])
    return Data(inputs, torch.cat([known.targets, known.targets[:1]]), known.shape)


def test_a_sample_beyond_the_margin_is_inactive() -> None:
    known = kkt_point().truth
    made = victims.polynomial(beyond(known, 2.0), 16, active=[3, 1, 0, 2])
    assert made.training["margins"][4] == pytest.approx(8.0)
    assert made.training["active"] == [0, 1, 2, 3]
    again = victims.polynomial(known, 16)
    for name, w in kkt_point().trained.items():
        assert torch.allclose(made.trained[name], w) and torch.equal(again.trained[name], w)


def test_what_cannot_be_built() -> None:
    known = kkt_point().truth
    for options, words in (
        ({"degree": 2}, "degree: .*at least 3, got 2"),
        ({"width": 0}, "width: .*got 0"),
        ({"active": [4]}, "active: .*0 to 3"),
        ({"active": []}, "active: .*0 to 3"),
        ({"data": replace(known, targets=0 * known.targets)}, "none zero"),
        ({"data": beyond(known, 0.5), "active": range(4)}, "inactive"),
    ):
        with pytest.raises(InputError, match=words):
            victims.polynomial(**{"data": known, "width": 16} | options)
    with pytest.raises(InputError, match="at most 10"):
        victims.labellings(data.sphere(20, 11))


def test_identify(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def identify(code: int, said: str, *words: object) -> None:
        with pytest.raises(SystemExit) if code else nullcontext() as ending:
            exhume_("identify", *words)
        assert not code or ending.value.code == code
        assert said in "".join(capsys.readouterr())

    out, victim = Path("found"), kkt_point()
    square = victims.two_layer(data.sphere(4, 2), 6, "polynomial:0,1,1", rate=1e-3, steps=5)
    for name, made in (("model", victim), ("few", kkt_point(width=4)), ("two", square)):
        made.save(Path(name))
    torch.save(dict(victim.trained), "weights.pt")
    identify(0, "4 active samples", "model", "--out", out)
    kept = read_tensors(out / "recovered.safetensors", ("samples", "multipliers"))
    signed = victim.truth.inputs * victim.truth.targets
    assert torch.cdist(signed, kept["samples"]).amin(1).max() < 1e-7
    record = json.loads((out / "identifiability.json").read_text())
    assert record["holds"] and record["rank"] == record["unknowns"] == 20
    assert (out / "recovered.safetensors").stat().st_mode & 0o077 == 0
    identify(1, "the rank condition fails", "few", "--out", "none")
    assert not Path("none/recovered.safetensors").exists()
    sizes = json.dumps({"shape": [9], "width": 16, "activation": "polynomial:0,0,0,1"})
    named = ("--model", "exhume.models.architectures:two_layer", "--arguments", sizes)
    identify(0, "the rank condition holds", *named, "--trained", "weights.pt")
    identify(2, "not empty", "model", "--out", out)
    identify(2, "degree 2", "two")
