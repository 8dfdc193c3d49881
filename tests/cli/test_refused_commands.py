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

KKT = "--architecture kkt_mlp --classes parity --samples 4 --widths 30"
OWN = "audit --model m:f --trained t.pt"


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Said:
    """A command that must end with code 2 and one paragraph, and write nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        before = tree(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            exhume_(*words)
        assert ending.value.code == 2
        said = capsys.readouterr()
        assert said.err.startswith("exhume: ") and said.err.endswith("\n")
        assert "\n\n" not in said.err and "Traceback" not in said.err
        assert tree(tmp_path) == before
        return said.err

    return call


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("victim sphere --samples 0", "samples"),
        ("victim sphere --dim 0", "dim"),
        ("victim sphere --activation swish", "swish|relu"),
        ("victim sphere --ratio -1", "ratio"),
        ("victim sphere --seed -1", "seed"),
        ("victim imagenet", "imagenet|digits|sphere"),
        ("victim cifar10", "cifar10|EXHUME_DATA"),
        ("victim digits --samples 100000", "100000|digits"),
        ("victim digits --classes [3,33]", "33|digits"),
        ("victim faces --classes parity", "faces|random"),
        ("victim digits --samples 3 --architecture mlp", "widths|mlp needs"),
        ("victim digits --samples 3 --architecture resnet", "width|resnet needs"),
        ("victim digits --samples 3 --architecture resnet --ratio 3", "ratio|resnet|blocks"),
        ("victim digits --samples 3 --architecture vit --patch 3", "patch|8×8"),
        ("victim digits --samples 3 --architecture two_layer --ridge 1", "ridge|two_layer"),
        ("victim digits --samples 3 --architecture two_layer --momentum 2", "momentum"),
        ("victim digits --samples 3 --architecture two_layer --batch 2", "batch|sgd"),
        ("victim digits --samples 3 --optimizer adam", "optimizer|random_features"),
        ("victim digits --samples 3 --loss cross_entropy", "cross_entropy|logistic"),
        (f"victim sphere {KKT}", "[−1, 1]|images"),
        (f"victim digits {KKT} --normalise", "[−1, 1]|--normalise"),
        (f"victim digits {KKT} --centre all", "[−1, 1]|--centre"),
        (f"victim digits {KKT} --loss cross_entropy", "logistic|cross_entropy|decay"),
        (f"victim digits {KKT} --decay -1", "decay|above 0"),
        (f"victim digits {KKT} --level 2", "level"),
        (f"victim digits {KKT} --until 1e-3", "until|kkt_mlp|level"),
        (f"victim digits {KKT} --classes vehicles", "vehicles|cifar10"),
        ("victim sphere --out @/run", "@/run"),
        ("victim sphere --out @/run/config.yaml", "config.yaml"),
        ("victim sphere --out @/run/config.yaml/model", "config.yaml"),
        ("audit --samples 4", "--model"),
        ("audit nowhere", "nowhere"),
        (f"audit @/model/{CARD}", CARD),
        ("audit @", CARD),
        ("audit @/model --samples -3", "samples|-3"),
        ("audit @/model --method magic", "magic|exhume|iurada2025"),
        ("audit @/model --method iurada2025", "samples"),
        ("audit @/model --device abacus", "abacus|cpu"),
        ("audit @/model --resume", "new|resume"),
        ("audit @/model --seed -1", "seed"),
        ("audit @/model --time-limit -1", "time"),
        ("audit @/model --product-limit 0", "product_limit|at least 1"),
        ("audit @/model --initial i.pt", "initial|is a model folder"),
        ("audit @/model --input-shape 4,5", "card|is a model folder"),
        ("audit @/model --arguments {}", "arguments|is a model folder"),
        ("audit @/model --point final", "random-features"),
        ("audit @/model --samples 481", "samples: 481 are more than the 480 features"),
        ("audit @/model --rank 2", "takes none"),
        ("audit @/model --rank 2 --method tansley2026", "first layer"),
        ("audit @/model --out @/images --resume", "no run to resume"),
        ("audit @/model --samples 4 --out @/run", "--resume"),
        ("audit @/model --samples 4 --out @/run --resume", "complete"),
        (f"audit @/model --samples 4 --out @/run/{CONFIG}", CONFIG),
        (f"audit @/model --samples 4 --out @/run/{CONFIG}/run", CONFIG),
        (f"{OWN} --card c.yaml --range 0,1", "card"),
        (f"{OWN} --card c.yaml", "c.yaml: no such file"),
        (f"{OWN} --classes 3", "--input-shape"),
        (f"{OWN}", "input_shape"),
        ("audit m:f", "is a factory|--trained"),
        ("audit @/margin --samples 4 --method loo2023", "loo2023|premise margin|haim2022"),
        ("audit @/margin --samples 4 --method tansley2026", "tansley2026|sphere|box"),
        ("audit @/margin --samples 4 --method haim2022 --premise decay", "haim2022|buzaglo2023"),
        ("audit @/margin --samples 4 --method haim2022 --premise change", "haim2022|loo2023"),
        ("audit @/margin --samples 4 --parameters last", "premise margin|leave out|change"),
        ("audit @/margin --samples 4 --point both --premise decay", "premise decay|leave out"),
        ("audit @/margin --method haim2022", "number of samples"),
        (f"score @/run --truth @/images/{TRUTH}", f"64|20|{TRUTH}"),
        ("score @/run --truth @/nowhere.safetensors", "nowhere.safetensors"),
        (f"score @/run --truth @/model/{TRAINED}", f"model/{TRAINED}"),
        (f"score @/run --truth @/model/{CARD}", f"model/{CARD}"),
        ("score nowhere", "nowhere"),
        ("score @", "@"),
        ("report nowhere", "nowhere"),
        ("identify", "--model"),
        ("identify m:f", "is a factory|--trained"),
        ("identify @/model", "network"),
        ("identify @/margin --arguments {}", "arguments|is a model folder"),
        ("demo --out @", "@|not an earlier demo"),
    ],
)
def test_what_cannot_be(
    command: str, named: str, workshop: Path, refused: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXHUME_DATA", raising=False)
    words = command.replace("@", str(workshop)).split()
    if words[0] in ("victim", "audit") and "--out" not in words:
        words += ["--out", "new"]
    before = {path: path.stat().st_mtime_ns for path in workshop.rglob("*")}
    said = refused(*words)
    assert {path: path.stat().st_mtime_ns for path in workshop.rglob("*")} == before
    assert all(word.replace("@", str(workshop)) in said for word in named.split("|"))


MAP = "v.npy"


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
    """One entry replaced."""
    return lambda tensor: tensor.put(torch.tensor([7]), torch.tensor([value], dtype=tensor.dtype))


@pytest.mark.parametrize(
    ("file", "how", "named"),
    [
        (TRAINED, spoiled(torch.nan), f"NaN|{TRAINED}"),
        (TRAINED, spoiled(torch.inf), "infinite"),
        (TRAINED, torch.zeros_like, "zero"),
        (INITIAL, spoiled(torch.nan), "first layer"),
        (TRAINED, lambda t: t[:-1], f"{TRAINED}|(479, 1)|480"),
        (TRAINED, lambda t: t[:, 0], f"{TRAINED}|(480,)"),
        (INITIAL, lambda t: t[:-1], f"{INITIAL}|(479, 20)"),
        (INITIAL, lambda t: t[:, :-1], f"{INITIAL}|(480, 19)"),
        (INITIAL, lambda t: t[:, :, None], INITIAL),
        (INITIAL, torch.zeros_like, "first"),
        (CARD, {"shape": [21]}, "21|20"),
        (CARD, {"dim": 21}, "20|21"),
        (CARD, {"width": 481}, "481"),
        (CARD, {"width": "wide"}, f"{CARD}|wide"),
        (CARD, {"kind": "transformer"}, f"{CARD}|random_features"),
        (CARD, {"activation": "swish"}, "swish"),
        (CARD, {"shape": [-4, -5]}, "shape"),
        (CARD, {"shape": [4, 5], "display": "loud"}, "display"),
        (CARD, {"first": {"source": "seed", "seed": -1}}, "seed"),
        (CARD, {"first": {"source": "cloud"}}, "cloud"),
        (CARD, None, CARD),
        (INITIAL, None, INITIAL),
        (TRAINED, -100, TRAINED),
        (TRAINED, b"", TRAINED),
        (CARD, -30, f"{CARD}|JSON"),
        (CARD, b"\xff\xfe", f"{CARD}|JSON"),
        (CARD, b"[]", CARD),
        (MAP, lambda v: v[:-1], f"{MAP}|(479, 20)"),
        (MAP, lambda v: v * np.where(np.arange(20) == 3, np.float32(np.nan), 1), "NaN"),
        (MAP, lambda v: v.astype(str), MAP),
    ],
)
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
        (CANDIDATES, None, CANDIDATES),
        (CONFIG, None, CONFIG),
        (RESULT, -10, RESULT),
        (CONFIG, b"model: {", CONFIG),
        (CONFIG, b"model: gone", "gone"),  # a model that has vanished
        (TRUTH, -10, TRUTH),
    ],
)
def test_a_damaged_run_or_truth(
    file: str, how: Any, named: str, workshop: Path, tmp_path: Path, refused: Said
) -> None:
    shutil.copytree(workshop / "run", tmp_path / "run")
    shutil.copy(workshop / "model" / TRUTH, tmp_path / "run")
    damage(tmp_path / "run", file, how)
    assert named in refused("score", "run", "--truth", f"run/{TRUTH}")
    if named == RESULT:
        assert RESULT in refused("report", "run")
    if named == "gone":
        assert named in refused("score", "run")
