"""What commands refuse: exit code 2, a sentence that names the fault, and nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import exhume_, tree
from exhume.auditing.folder import CANDIDATES, CONFIG, RESULT
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH

Said = Callable[..., str]

MAP = "v.npy"
KKT = "--architecture kkt_mlp --classes parity --samples 4 --widths 30"


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Said:
    """A command that must end with code 2 and one paragraph, and write nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXHUME_DATA", raising=False)

    def call(*words: object) -> str:
        before = tree(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            exhume_(*words)
        said = capsys.readouterr()
        assert said.err.startswith("exhume: ") and said.err.endswith("\n")
        assert "\n\n" not in said.err and "Traceback" not in said.err
        assert tree(tmp_path) == before
        return said.err

    return call


REFUSED = {
    "victim": {
        "imagenet": "imagenet|digits|sphere", "cifar10": "cifar10|EXHUME_DATA",
        "digits --samples 100000": "100000|digits", "digits --classes [3,33]": "33|digits",
        "faces --classes parity": "faces|random",
    },
    "victim sphere": {
        "--samples 0": "samples", "--dim 0": "dim", "--ratio -1": "ratio", "--seed -1": "seed",
        "--activation swish": "swish|relu", KKT: "[−1, 1]|images", "--out @/run": "@/run",
        "--out @/run/config.yaml": "config.yaml", "--out @/run/config.yaml/model": "config.yaml",
    },
    "victim digits --samples 3": {
        "--architecture mlp": "widths|mlp needs", "--architecture resnet": "width|resnet needs",
        "--architecture resnet --ratio 3": "ratio|resnet|blocks",
        "--architecture vit --patch 3": "patch|8×8",
        "--architecture two_layer --ridge 1": "ridge|two_layer",
        "--architecture two_layer --momentum 2": "momentum",
        "--architecture two_layer --batch 2": "batch|sgd",
        "--optimizer adam": "optimizer|random_features",
        "--loss cross_entropy": "cross_entropy|logistic",
    },
    f"victim digits {KKT}": {
        "--normalise": "[−1, 1]|--normalise", "--centre all": "[−1, 1]|--centre",
        "--loss cross_entropy": "logistic|cross_entropy|decay", "--decay -1": "decay|above 0",
        "--level 2": "level", "--until 1e-3": "until|rest|level",
        "--training flow --level 1e-3": "level|flow|until",
        "--classes vehicles": "vehicles|cifar10",
    },
    "audit": {
        "--samples 4": "--model", "nowhere": "nowhere", f"@/model/{CARD}": CARD, "@": CARD,
        "m:f": "is a factory|--trained", "nowhere --initial base": "nowhere|no such folder",
        "@/model --samples ten": "samples: expected a whole number, got 'ten'|audit --help",
        "@/model --premise lazy": "premise: expected one of change, margin|got 'lazy'",
        "@/model --lr 3": "--lr|audit --help",
    },
    "audit @/model": {
        "--method haim2022 --preset b10": "b9|rbij|b10", "--preset b9": "exhume has none|haim2022",
        "--target weights": "target|premise change",
        "--samples -3": "samples|-3", "--method magic": "magic|exhume|iurada2025",
        "--method iurada2025": "samples", "--device abacus": "abacus|cpu", "--seed -1": "seed",
        "--resume": "new|resume", "--time-limit -1": "time", "--point final": "random-features",
        "--product-limit 0": "product_limit|at least 1", "--rank 2": "takes none",
        "--initial i.pt": "initial|is a model folder", "--arguments {}": "arguments|is a model",
        "--input-shape 4,5": "card|is a model folder",
        "--samples 481": "samples: 481 are more than the 480 features",
        "--rank 2 --method tansley2026": "first layer", "--out @/images --resume": "no run to",
    },
    "audit @/model --samples 4": {
        "--out @/run": "--resume", "--out @/run --resume": "complete",
        f"--out @/run/{CONFIG}": CONFIG, f"--out @/run/{CONFIG}/run": CONFIG,
    },
    "audit --model m:f --trained t.pt": {
        "--card c.yaml --range 0,1": "card", "--card c.yaml": "c.yaml: no such file",
        "--classes 3": "--input-shape", "": "input_shape",
    },
    "audit @/margin": {"--method haim2022": "number of samples"},
    "audit @/margin --samples 4": {
        "--method loo2023": "loo2023|premise margin|haim2022",
        "--method tansley2026": "tansley2026|sphere|box",
        "--method haim2022 --premise decay": "haim2022|buzaglo2023",
        "--method haim2022 --premise change --anyway": "haim2022|loo2023",
        "--parameters last": "premise margin|leave out|change",
        "--point both --premise decay": "premise decay|leave out",
    },
    "score": {"nowhere": "nowhere", "@": "@"},
    "score @/run --truth": {
        f"@/images/{TRUTH}": f"64|20|{TRUTH}", "@/nowhere.safetensors": "nowhere.safetensors",
        f"@/model/{TRAINED}": f"model/{TRAINED}", f"@/model/{CARD}": f"model/{CARD}",
    },
    "report": {"nowhere": "nowhere"},
    "identify": {
        "": "--model", "m:f": "is a factory|--trained", "@/model": "network",
        "@/margin --arguments {}": "arguments|is a model folder",
    },
    "demo": {"--out @": "@|not an earlier demo"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "named"),
    [(f"{name} {words}", said) for name, cases in REFUSED.items() for words, said in cases.items()],
)
def test_what_cannot_be(command: str, named: str, workshop: Path, refused: Said) -> None:
    words = command.replace("@", str(workshop)).split()
    if words[0] in ("victim", "audit") and "--out" not in words:
        words += ["--out", "new"]
    before = {path: path.stat().st_mtime_ns for path in workshop.rglob("*")}
    said = refused(*words)
    assert {path: path.stat().st_mtime_ns for path in workshop.rglob("*")} == before
    assert all(word.replace("@", str(workshop)) in said for word in named.split("|"))


def damage(folder: Path, file: str, how: Any) -> None:
    """Remove a file (None), write other bytes, cut it short (a number), or change what it holds."""
    path = folder / file
    if how is None:
        path.unlink()
    elif isinstance(how, bytes | int):
        path.write_bytes(how if isinstance(how, bytes) else path.read_bytes()[:how])
    elif isinstance(how, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | how))
    elif file == MAP:  # the first layer in a file of its own
        np.save(path, how(load_file(folder / INITIAL)["first"].numpy()))
        damage(folder, CARD, {"first": {"source": "map", "file": MAP}})
    else:
        ((name, tensor),) = load_file(path).items()
        save_file({name: how(tensor).contiguous()}, path)


def spoiled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.put(torch.tensor([7]), torch.tensor([value], dtype=tensor.dtype))


@pytest.mark.parametrize(
    ("file", "how", "named"),
    [
        (TRAINED, spoiled(torch.nan), f"NaN|{TRAINED}"), (TRAINED, spoiled(torch.inf), "infinite"),
        (TRAINED, torch.zeros_like, "zero"), (TRAINED, lambda t: t[:-1], f"{TRAINED}|(479, 1)|480"),
        (TRAINED, lambda t: t[:, 0], f"{TRAINED}|(480,)"), (TRAINED, -100, TRAINED),
        (TRAINED, b"", TRAINED), (INITIAL, spoiled(torch.nan), "first layer"),
        (INITIAL, torch.zeros_like, "first"), (INITIAL, lambda t: t[:-1], f"{INITIAL}|(479, 20)"),
        (INITIAL, lambda t: t[:, :-1], f"{INITIAL}|(480, 19)"), (INITIAL, None, INITIAL),
        (INITIAL, lambda t: t[:, :, None], INITIAL),
        (CARD, {"shape": [21]}, "21|20"), (CARD, {"dim": 21}, "20|21"),
        (CARD, {"width": 481}, "481"), (CARD, {"width": "wide"}, f"{CARD}|wide"),
        (CARD, {"kind": "transformer"}, f"{CARD}|random_features"),
        (CARD, {"activation": "swish"}, "swish"), (CARD, {"shape": [-4, -5]}, "shape"),
        (CARD, {"shape": [4, 5], "display": "loud"}, "display"),
        (CARD, {"first": {"source": "seed", "seed": -1}}, "seed"),
        (CARD, {"first": {"source": "cloud"}}, "cloud"), (CARD, None, CARD), (CARD, b"[]", CARD),
        (CARD, -30, f"{CARD}|JSON"), (CARD, b"\xff\xfe", f"{CARD}|JSON"),
        (MAP, lambda v: v[:-1], f"{MAP}|(479, 20)"), (MAP, lambda v: v.astype(str), MAP),
        (MAP, lambda v: v * np.where(np.arange(20) == 3, np.float32(np.nan), 1), "NaN"),
    ],
)  # fmt: skip
def test_a_damaged_model(
    file: str, how: Any, named: str, workshop: Path, tmp_path: Path, refused: Said
) -> None:
    shutil.copytree(workshop / "stored", tmp_path / "model")
    damage(tmp_path / "model", file, how)
    said = refused("audit", "model", "--samples", 4, "--out", "new")
    assert all(word in said for word in named.split("|"))


@pytest.mark.parametrize(
    ("file", "how", "named"),
    [
        (RESULT, None, "--resume"),
        *((file, None, file) for file in (CANDIDATES, CONFIG)),
        *((file, -10, file) for file in (RESULT, TRUTH)),
        (CONFIG, b"model: {", CONFIG),
        (CONFIG, b"model: gone", "gone"),  # a model that has vanished
    ],
)
def test_a_damaged_run_or_truth(
    file: str, how: Any, named: str, workshop: Path, tmp_path: Path, refused: Said
) -> None:
    shutil.copytree(workshop / "run", tmp_path / "run")
    shutil.copy(workshop / "model" / TRUTH, tmp_path / "run")
    damage(tmp_path / "run", file, how)
    words = ("--trust",) if named == "gone" else ("--truth", f"run/{TRUTH}")
    assert named in refused("score", "run", *words)
    if named == RESULT:
        assert RESULT in refused("report", "run")
