"""Small problems for the methods, and the published losses written with plain autograd."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box, Domain, Sphere, SphereInBox
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.features.dense import DenseGradients
from exhume.methods import Buzaglo2023, Haim2022, Loo2023, Reconstruction, reconstruct
from exhume.methods.penalties import Hyperparameters, Place, balanced_labels
from exhume.methods.progress import Method
from exhume.models.formulation import Told, weights_problem
from nets import Net, make, names_of
from problems import THREAT, gaussian

Sigma = Callable[[Tensor], Tensor]
DIM, SAMPLES = 6, 3
LOW, HIGH = torch.linspace(-0.9, -0.2, 6).double(), torch.linspace(0.3, 1.1, 6).double()
KINDS = {"one": 1, "several": 3, "decay": 2, "change": 2, "both": 2, "box": 1}  # and outputs
PREMISES = {Rule.MARGIN: Premise.MARGIN, Rule.FREE: Premise.CHANGE}


def watched(
    problem: Problem, samples: int | None, method: str | Method, seed: int = 0, **options: Any
) -> tuple[Reconstruction, list[Any]]:
    """What a run found, and its progress after every move."""
    moves: list[Any] = []
    see = {"observe": lambda progress, _: moves.append(progress)}
    return reconstruct(problem, samples, seed, method, **see, **options), moves


def haim(steps: int) -> Haim2022:
    """With nothing left to tune."""
    given = {"rate": 0.05, "scale": 0.3, "threshold": 0.05, "sharpness": 20.0}
    return Haim2022(steps=steps, multiplier_rate=0.05, **given)


def net_of(outputs: int, seed: int = 0) -> Net:
    """ReLU, two hidden layers with biases; images of 2×3."""
    widths = {"shape": [2, 3], "widths": [6, 5], "activation": "relu"}
    return make("mlp", outputs, seed, step=0.3, **widths)


def features_of(net: Net, *points: Mapping[str, Tensor]) -> DenseGradients:
    """Gradients of all parameters, at the trained weights if nothing is said."""
    return DenseGradients(net.network, points or (net.trained,), "", block=tuple(names_of(net)))


def posed(net: Net, rule: Rule, point: str = "final", domain: Domain | None = None) -> Problem:
    """Target θ for the margin, θ − θ₀ otherwise."""
    names, features = names_of(net), features_of(net, *net.points(point))
    ends = (net.trained, net.initial)
    theta, start = (torch.cat([end[name].flatten() for name in names])[:, None] for end in ends)
    target, where = theta - start if rule is Rule.FREE else theta, domain or Sphere()
    return Problem(target, features, THREAT, net.network.shape, where, premise=PREMISES[rule])


def weights_of(premise=Premise.MARGIN, outputs: int = 1, domain: Domain | None = None) -> Problem:
    """The weights themselves as the target, of one hidden layer with biases."""
    sizes = {"shape": [DIM], "widths": [12], "activation": "relu", "bias": "first"}
    net = make("mlp", outputs, 0, step=0.3, **sizes)
    return weights_problem(net.network, net.trained, premise, Told(domain))


def combined(outputs=1, rule=Rule.MARGIN, samples=4, activation="relu") -> Problem:
    """A target that is a combination of gradients at samples, so some candidates explain it."""
    net = make("mlp", outputs, 0, shape=[2, 3], widths=[12, 9], activation=activation)
    features, labels = features_of(net), balanced_labels(samples, outputs)
    if rule is Rule.FREE:
        weights = gaussian(samples * outputs, 1, seed=2)
    else:
        signs = labels[:, None] if outputs == 1 else 2 * torch.eye(outputs)[labels] - 1
        weights = (0.5 * signs).double().reshape(-1, 1)
    target = features.linearize(0.5 * gaussian(samples, features.dim, seed=1)).combine(weights)
    return Problem(target, features, THREAT, (2, 3), Box(-1.0, 1.0), premise=PREMISES[rule])


def planted(premise=Premise.MARGIN, width=100, seed=0) -> tuple[Problem, Tensor, Tensor]:
    """Δ = Φ(X)ᵀA at weights of random ReLUs that are not Δ, with X (n, d) and A (n,).

    For the margin A = K⁻¹(γy), so that ΦΔ = γy: all samples are exactly on it. Else A is random.
    ‖Δ‖ is the norm of the weights, so that sharpness has its usual unit.
    """
    sizes = {"shape": [DIM], "widths": [width], "activation": "relu", "bias": "first"}
    net = make("mlp", 1, seed, **sizes)
    weights = net.initial | {"1.bias": 0.3 * gaussian(width, seed=seed + 3)}
    features = features_of(net, weights)
    x = (0.5 * gaussian(SAMPLES, DIM, seed=seed + 1)).clamp(-1, 1)
    there = features.linearize(x)
    labels = torch.tensor([[1.0], [-1.0], [1.0]]).double()
    a = torch.linalg.solve(there.gram(), labels)
    assert (a * labels > 0).all()  # else this is no KKT point
    if premise is not Premise.MARGIN:
        a = gaussian(SAMPLES, 1, seed=seed + 9)
        a = a + 0.3 * a.sign()
    size = torch.cat([w.flatten() for w in weights.values()]).norm()
    a = a * size / there.combine(a).norm()
    target = there.combine(a)
    first = target[: width * DIM, 0].reshape(width, DIM)
    told = {"first_layer": FirstLayer(torch.zeros_like(first), first), "premise": premise}
    return Problem(target, features, THREAT, (DIM,), Box(-1.0, 1.0), **told), x, a[:, 0]


def softplus(z: Tensor, beta: float = 11.0) -> Tensor:
    return torch.log1p(torch.exp(beta * z)) / beta


def smoothed_relu(z: Tensor) -> Tensor:
    """ReLU forward, sigmoid(7z) backward."""
    soft = softplus(z, 7.0)
    return torch.relu(z).detach() + (soft - soft.detach())


def forward(weights: Mapping[str, Tensor], sigma: Sigma, x: Tensor) -> Tensor:
    layers = list(weights.values())
    for i in range(0, len(layers), 2):
        x = x @ layers[i].T + layers[i + 1]
        x = sigma(x) if i < len(layers) - 2 else x
    return x


def gradients(weights: Mapping[str, Tensor], sigma: Sigma, x: Tensor) -> list[list[Tensor]]:
    """∇θ f_c(x_j) by candidate and output, differentiable in x."""
    theta = {name: w.clone().requires_grad_() for name, w in weights.items()}
    rows = []
    for row in x:
        f = forward(theta, sigma, row)
        parts = [torch.autograd.grad(f_c, list(theta.values()), create_graph=True) for f_c in f]
        rows.append([torch.cat([part.flatten() for part in one]) for one in parts])
    return rows


@dataclass(frozen=True)
class Oracle:
    """A published loss of a problem as a function of x and λ, and a place to take it at."""

    problem: Problem
    sigma: Sigma
    points: Sequence[Mapping[str, Tensor]]
    place: Place
    settings: Hyperparameters
    low: Tensor | float
    high: Tensor | float

    def residual(self, x: Tensor, multipliers: Tensor) -> Tensor:
        total = torch.zeros_like(self.problem.target[:, 0])
        rows = [gradients(weights, self.sigma, x) for weights in self.points]
        outputs = forward(self.points[-1], torch.relu, x)
        for j, label in enumerate(self.place.labels.tolist()):
            if self.problem.rule is Rule.FREE:
                mine = [g for one in rows for g in one[j]]
                for weight, g in zip(multipliers[j], mine, strict=True):
                    total = total + weight * g
            elif outputs.shape[1] == 1:
                total = total + multipliers[j, 0] * label * rows[0][j][0]
            else:
                others = [k for k in range(outputs.shape[1]) if k != label]
                rival = max(others, key=lambda k, j=j: outputs[j, k].item())
                total = total + multipliers[j, 0] * (rows[0][j][label] - rows[0][j][rival])
        return self.problem.target[:, 0] - total / self.place.divisor

    def __call__(self, x: Tensor, multipliers: Tensor) -> Tensor:
        loss = self.residual(x, multipliers).square().sum()
        s = self.settings
        for j, omega in enumerate(self.place.shares):
            box = torch.relu(x[j] - self.high).square() + torch.relu(self.low - x[j]).square()
            short = torch.relu(s.threshold - multipliers[j] / omega).square().sum()
            loss = loss + omega * (s.box * box.sum() + s.push * short)
            if s.smoothness:
                image = x[j].reshape(1, 1, *self.problem.shape)
                kernel = torch.tensor([[1, 2, 1], [2, 4, 2], [1, 2, 1]]).to(x)[None, None] / 16
                padded = torch.nn.functional.pad(image, (1, 1, 1, 1), mode="replicate")
                rough = image - torch.nn.functional.conv2d(padded, kernel)
                loss = loss + omega * s.smoothness * rough.square().sum()
        return loss + s.sparsity * multipliers.abs().sum()


def spot(kind: str) -> Oracle:
    outputs, boxed = KINDS[kind], kind == "box"
    rule = Rule.MARGIN if kind in ("one", "several", "box") else Rule.FREE
    point = "both" if kind == "both" else "final"
    domain = SphereInBox(Sphere(), Box(LOW, HIGH)) if boxed else None
    problem = posed(net_of(outputs), rule, point, domain)
    if kind in ("change", "both"):
        recipe, values = Loo2023(rate=0.02, smoothness=30.0, sparsity=0.01), {"rate": 0.02}
        sigma, entries = softplus, 4 if kind == "both" else 2
    else:
        recipe = Haim2022() if outputs == 1 else Buzaglo2023()
        values = {"rate": 0.01, "scale": 1.0, "threshold": 0.4, "sharpness": 7.0}
        values |= {"multiplier_rate": 0.05} if outputs > 1 else {}
        sigma, entries = smoothed_relu, 2 if rule is Rule.FREE else 1
    multipliers = gaussian(4, entries, seed=2)
    multipliers = multipliers.abs() if rule is Rule.MARGIN else multipliers
    chosen = recipe.hyperparameters(problem, values)
    shares = torch.tensor([1.0, 0.5, 0.5, 0.25]).double()
    labels, divisor = balanced_labels(4, outputs), 4.0 * chosen.divisor
    place = Place(2 * gaussian(4, 6, seed=1), multipliers, labels, shares, divisor)
    bounds = (LOW, HIGH) if boxed else (-math.sqrt(6), math.sqrt(6))
    return Oracle(problem, sigma, net_of(outputs).points(point), place, chosen, *bounds)
