"""Exact KKT points: built, saved, and read by the command line and the measurement."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from exhume import data, victims
from exhume.cli.main import main
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth
from exhume.files import read_tensors
from exhume.victims import Victim
from exhume.victims.polynomial import _eigenneurons

SAMPLES = data.sphere(9, 4, 2)


@pytest.fixture(scope="module")
def labelled() -> Data:
    return victims.labellings(SAMPLES)[0]


@pytest.fixture(scope="module")
def victim(labelled: Data) -> Victim:
    return victims.polynomial(labelled, 16)


def kkt_by_autograd(victim: Victim) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, how far θ is from the span of their gradients, and the multipliers of that."""
    theta = {name: w.clone().requires_grad_() for name, w in victim.trained.items()}
    outputs = functional_call(victim.model.network.module, theta, (victim.truth.inputs,))[:, 0]
    slopes = [torch.autograd.grad(f, list(theta.values()), retain_graph=True) for f in outputs]
    matrix = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in slopes], 1)
    flat = torch.cat([w.flatten() for w in victim.trained.values()])
    b = torch.linalg.lstsq(matrix, flat[:, None]).solution[:, 0]
    return outputs.detach(), (matrix @ b - flat).norm() / flat.norm(), b


@pytest.mark.parametrize(("degree", "width"), [(3, 4), (3, 16), (4, 24), (5, 12)])
def test_a_kkt_point_is_one(degree: int, width: int, labelled: Data) -> None:
    known = labelled
    if degree > 3:
        every = victims.labellings(data.sphere(9, 3, 2), degree)
        rows = {tuple(one.targets[:, 0].tolist()) for one in every}
        assert len(every) == len(rows) == 4 and all(row[0] == 1 for row in rows)
        known = every[0]
    made = victims.polynomial(known, width, degree)
    f, off, b = kkt_by_autograd(made)
    labels = known.targets[:, 0]
    assert off < 1e-10 and made.training["violation"] < 1e-10
    assert (b * labels > 0).all() and torch.allclose(labels * f, torch.ones_like(f), atol=1e-10)
    assert made.training["margins"] == pytest.approx([1.0] * known.samples)
    assert made.training["active"] == list(range(known.samples))
    assert len(made.trained["1.weight"]) == width
    assert residual_at_truth(made.problem, made.truth) < 1e-20 and made.problem.drift == 0
    assert "KKT" in made.problem.threat_model.assumes[0]
    first, last = made.trained["1.weight"], made.trained["3.weight"][0]
    assert torch.allclose(first.square().sum(1), degree * last.square())  # balanced


@pytest.mark.parametrize("degree", [3, 4, 5])
def test_orthogonal_samples_have_the_eigenvectors_of_theory(degree: int) -> None:
    """u ∝ Σ_S ± b_i^{−1/(α−2)} x_i: 2³ − 1 subsets, with all signs where α is even."""
    b = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    found = _eigenneurons(torch.eye(3).double(), b, degree, torch.Generator().manual_seed(0))
    assert len(found) == {3: 7, 4: 13, 5: 7}[degree]
    for w in found:
        a = (b * w**degree).sum()
        assert torch.allclose(w, degree * a * b * w ** (degree - 1), atol=1e-9)
        inside = w.abs() > 1e-6
        sizes = w[inside].abs() * b[inside] ** (1 / (degree - 2))
        assert torch.allclose(sizes, sizes[:1].expand_as(sizes))


def beyond(known: Data, factor: float) -> Data:
    inputs = torch.cat([known.inputs, factor * known.inputs[:1]])
    return Data(inputs, torch.cat([known.targets, known.targets[:1]]), known.shape)


def test_a_sample_beyond_the_margin_is_inactive(labelled: Data, victim: Victim) -> None:
    made = victims.polynomial(beyond(labelled, 2.0), 16, active=[3, 1, 0, 2])
    assert made.training["margins"][4] == pytest.approx(8.0)
    assert made.training["active"] == [0, 1, 2, 3]
    again = victims.polynomial(labelled, 16)
    for name, w in victim.trained.items():
        assert torch.allclose(made.trained[name], w) and torch.equal(again.trained[name], w)


ZERO = Data(SAMPLES.inputs, 0 * SAMPLES.targets, SAMPLES.shape)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda known: victims.polynomial(known, 8, degree=2), "degree: .*at least 3, got 2"),
        (lambda known: victims.polynomial(known, 0), "width: .*got 0"),
        (lambda known: victims.polynomial(known, 8, active=[4]), "active: .*0 to 3"),
        (lambda known: victims.polynomial(known, 8, active=[]), "active: .*0 to 3"),
        (lambda _: victims.polynomial(ZERO, 8), "none zero"),
        (lambda _: victims.labellings(data.sphere(20, 11)), "at most 10"),
        (lambda known: victims.polynomial(beyond(known, 0.5), 16, active=range(4)), "inactive"),
    ],
)
def test_what_cannot_be_built(call: Any, words: str, labelled: Data) -> None:
    with pytest.raises(InputError, match=words):
        call(labelled)


def test_identify(
    victim: Victim, labelled: Data, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def identify(code: int, said: str, *words: object) -> None:
        found = 0
        try:
            main(["identify", *map(str, words)])
        except SystemExit as ending:
            found = int(str(ending.code))
        assert found == code and said in "".join(capsys.readouterr())

    known, out = data.sphere(4, 2), Path("found")
    victim.save(Path("model"))
    victims.polynomial(labelled, 4).save(Path("few"))
    victims.two_layer(known, 6, "polynomial:0,1,1", rate=1e-3, steps=5).save(Path("two"))
    victims.random_features(known, 20).save(Path("random"))
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
    identify(2, "--trained", *named)
    identify(2, "not empty", "model", "--out", out)
    identify(2, "name a model folder")
    identify(2, "degree 2", "two")
    identify(2, "kind 'network'", "random")
