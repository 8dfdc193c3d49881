"""`exhume.audit`: what comes back, and the run folder that can be scored later."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import exhume
from exhume import DataCard, data, report
from exhume.auditing.folder import CANDIDATES, CONFIG, RunFolder
from exhume.auditing.judgement import SURE
from exhume.auditing.run import Event
from exhume.cli.main import main
from exhume.errors import InputError
from exhume.evaluate.runs import score_run
from lazy import Lazy, dense
from problems import gaussian

CARD = DataCard((4, 4), norm="sqrt_d")


@pytest.fixture(scope="module")
def known() -> Lazy:
    return Lazy(dense, (4, 4))


def audit(known: Lazy, **options: Any) -> exhume.Audit:
    told = {"device": "cpu", "controls": False, **options}
    return exhume.audit(known.model, known.initial, known.trained, **told)


def test_samples_and_pixels_come_back_in_their_shape(known: Lazy) -> None:
    shown: list[Event] = []
    result = audit(known, card=replace(CARD, mean=0.5, std=0.1), samples=3, show=shown.append)
    assert result.samples.shape == (3, 4, 4) and result.samples.dtype == torch.float64
    assert known.error(result.samples) < 1e-2
    assert torch.equal(result.samples.flatten(1), result.found.samples)
    assert result.claims and result.limits and shown
    assert (result.verdict, result.advice) == ("reconstructed", [])
    assert result.probabilities.shape == (3,) and result.probabilities.min() > SURE
    assert exhume.evaluate.score(result.found.samples, known.truth).recovered == 1
    assert torch.allclose(result.images(), (result.samples * 0.1 + 0.5).clamp(0, 1))


def test_channels_have_pixels_of_their_own(known: Lazy) -> None:
    told = {"mean": [0.2, 0.4], "std": [0.1, 0.2], "input_shape": (2, 2, 4)}
    result = audit(known, **told, samples=3, product_limit=1, seed=1)
    mean, std = (torch.tensor(told[word]).double()[:, None, None] for word in ("mean", "std"))
    assert torch.allclose(result.images(), (result.samples * std + mean).clamp(0, 1))
    with pytest.raises(InputError, match="pixels"):
        audit(known, input_shape=(2, 2, 4), product_limit=1).images()


def test_the_subspace_and_its_rank(known: Lazy) -> None:
    options = {"input_shape": (4, 4), "samples": 3, "method": "tansley2026", "product_limit": 1}
    for rank, found in {"gap": 3, "count": 3, 5: 5, None: 3}.items():
        assert audit(known, rank=rank, **options).found.rank == found


SHAPED: dict[str, Any] = {"input_shape": (4, 4)}
TANSLEY = {**SHAPED, "method": "tansley2026", "samples": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "input_shape"),
        ({"card": CARD, "input_shape": (16,)}, "shape"),
        ({**SHAPED, "product_limit": 2.5}, "product_limit: expected a whole number of at least 1"),
        ({**SHAPED, "premise": "rest"}, "change, margin, decay, replay, got 'rest'"),
        ({**TANSLEY, "rank": "count", "samples": None}, "count is the number of samples"),
        ({**TANSLEY, "rank": 99}, "rank: expected"),
        ({**TANSLEY, "rank": "most"}, "rank: expected"),
    ],
    ids=str,
)
def test_an_audit_that_cannot_be(options: dict[str, Any], words: str, known: Lazy) -> None:
    with pytest.raises(InputError, match=words):
        audit(known, **options)


def test_the_run_of_a_module_in_memory_is_read_but_not_opened(known: Lazy, tmp_path: Path) -> None:
    out, truth = tmp_path / "run", tmp_path / "truth.safetensors"
    result = audit(known, card=CARD, samples=3, out=out)
    assert torch.equal(load_file(out / CANDIDATES)["samples"], result.found.samples)
    config = yaml.safe_load((out / CONFIG).read_text())
    assert config["model"] is None
    data.save(known.truth, truth)
    with pytest.raises(InputError, match="in memory"):
        RunFolder(out).settings.open()
    record = score_run(out, truth)
    assert record["score"]["recovered"] == 1 and "floors" not in record

    # Scoring calls no factory because a run names it: the run may come from anyone.
    mark = tmp_path / "mark"
    hostile = f"from pathlib import Path\ndef make():\n    Path({str(mark)!r}).touch()"
    (tmp_path / "hostile.py").write_text(hostile)
    config |= {"model": f"{tmp_path}/hostile.py:make", "trained": "t.pt", "initial": "i.pt"}
    (out / CONFIG).write_text(yaml.safe_dump(config))
    assert "verdict" not in score_run(out, truth)
    assert report.write(out).exists() and not mark.exists()


def test_a_named_model_is_scored_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    net = "nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 1))"
    (tmp_path / "net.py").write_text(f"from torch import nn\nmodel = {net}")
    victim = Lazy(lambda: nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 1)), (16,))
    monkeypatch.chdir(tmp_path)
    torch.save(victim.initial, "before.pt")
    torch.save(victim.trained, "after.pt")
    data.save(victim.truth, "truth.safetensors")
    files = ("./net.py:model", "before.pt", Path("after.pt"))
    assumed = exhume.audit(*files, (16,), samples=3, device="cpu", product_limit=1, controls=False)
    assert any("rows of 16 numbers" in said and "norm" in said for said in assumed.warnings)
    words = "--initial before.pt --trained after.pt --input-shape 16 --samples 3"
    with pytest.raises(SystemExit) as refused:  # whoever types the command is asked
        main(["audit", "--model", files[0], *words.split()])
    assert refused.value.code == 2
    told = exhume.audit(*files, (16,), samples=3, out="run", device="cpu", norm="sqrt_d")
    assert not any("rows of 16 numbers" in said for said in told.warnings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    record = score_run(Path("../run"), Path("../truth.safetensors"), "../net.py:model")
    assert record["score"]["recovered"] == 1
    assert set(record["floors"]) == {"initial", "final", "midpoint", "both"}


def deep(shape: tuple[int, int, int, int]) -> tuple[nn.Module, Any, Any]:
    """A network of three layers, and its weights before and after a step on forty samples."""
    a, b, c, d = shape
    model = nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, d))
    model.double()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model(gaussian(40, a)).square().sum().backward()
    steps = {name: weight - 1e-3 * weight.grad for name, weight in model.named_parameters()}
    return model, before, {name: weight.detach() for name, weight in steps.items()}


def test_a_number_that_was_counted_is_given_up_where_it_cannot_be() -> None:
    told = {"input_shape": (60,), "norm": "sqrt_d", "device": "cpu", "product_limit": 1}
    found = exhume.audit(*deep((60, 200, 30, 1)), **told)  # forty directions, and thirty features
    assert 0 < len(found.samples) <= 30
    with pytest.raises(InputError, match="samples: 31 are more than the 30 features"):
        exhume.audit(*deep((60, 200, 30, 1)), samples=31, **told)
