"""Files that anybody may have changed: every reader refuses them with a sentence.

Each example is a good file with a few bytes changed, cut out, put in, repeated or exchanged for a
telling word, and goes to its reader. An `InputError` is right, and a value too; anything else is a
traceback for whoever was sent the file. `make test` reads a few examples of each; for more,

    EXHUME_MUTATIONS=10000 pytest tests/test_mutated_files.py
"""

import gzip
import io
import json
import mmap
import os
import pickle
import random
import re
import resource
import struct
import traceback
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from commands import exhume_
from exhume import data, recipes, report
from exhume.auditing.folder import CHECKPOINT, RunFolder, _read_checkpoint, read_run
from exhume.data.formats import read_images
from exhume.errors import InputError
from exhume.features.weights import Mapped
from exhume.methods import progress, reconstruct
from exhume.models.card import read_card
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH
from exhume.models.opening import Source, open_model
from exhume.models.state import read_state
from exhume.report.page import cards, model
from exhume.sweep import store
from exhume.victims import random_features, two_layer
from problems import gaussian
from sweep_cells import Square

# In all, over the files below: enough to show that a new reader is not careful
EXAMPLES = int(os.environ.get("EXHUME_MUTATIONS", "350"))
# Bytes that a reader may take beyond twice a file of some kilobytes: what Python and torch need
ROOM = 100 << 20

# What breaks readers: numbers that are too large, of the wrong kind, or none; depth; no text
WORDS = [
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"4294967295"),
    *(b'""', b'"x"', b"[]", b"{}", b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"\x00" * 8),
    *(b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x1b[2J", b"&a [*a]", b"!!int ''", b"- ", b": ", b"'"),
]
VALUE = re.compile(rb"[:\[,( ]\s*(\"[^\"]*\"|-?[\d.]+(?:e-?\d+)?|true|false|null|\[[^\[\]]*\])")
BIN, PY = "cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-py/data_batch_1"
IDX = "mnist/train-images-idx3-ubyte", "mnist/train-labels-idx1-ubyte"


def peak(anew: bool = False) -> int:
    """The most bytes that this process has held, since it was asked to count anew (on Linux)."""
    if anew and Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # else a test before would have set the mark
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_the_peak_counts_anew() -> None:
    def held() -> mmap.mmap:  # an array's bytes may stay with the allocator, these never do
        room = mmap.mmap(-1, ROOM)
        room.write(b"x" * ROOM)
        return room

    with held():
        before = peak(anew=True)
    low = peak(anew=True)
    held().close()
    assert before - low > ROOM // 2 and peak() - low > ROOM // 2


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Change a file in one to three places."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(content) + 1)
        size = draw.choice((1, 1, 2, 4, 8, 64, len(content) // 4 + 1))
        after, places = content[at + size :], list(VALUE.finditer(content[:20000]))
        flipped = bytes(byte ^ 1 << at % 8 for byte in content[at : at + 1])
        changes = (
            content[:at] + draw.randbytes(size) + after,
            content[:at] + after,
            content[: at + size] + content[at:],
            content[:at] + draw.choice(WORDS) + after,
            content[:at],
            content[:at] + flipped + content[at + 1 :],
        )
        if places and draw.random() < 0.5:  # a whole value, as JSON and headers have them
            found = draw.choice(places)
            content = content[: found.start(1)] + draw.choice(WORDS) + content[found.end(1) :]
        else:
            content = draw.choice(changes)
    return content


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good file of each kind, and those that its reader needs beside it."""
    root = tmp_path_factory.mktemp("good")
    state = {"0.weight": gaussian(6, 5), "0.bias": gaussian(6)}
    save_file(state, root / "w.safetensors")
    torch.save({"state_dict": state}, root / "w.pt")
    torch.save(state, root / "old.pt", _use_new_zipfile_serialization=False)
    (root / "hf").mkdir()
    save_file(state, root / "hf/a.safetensors")
    index = {"weight_map": dict.fromkeys(state, "a.safetensors")}
    (root / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    np.save(root / "v.npy", gaussian(30, 4).float().numpy())
    pixels, labels = np.arange(9 * 64, dtype=np.uint8).reshape(9, 8, 8), np.arange(9)
    np.savez(root / "fashion_mnist.npz", x=pixels, y=labels)
    np.savez_compressed(root / "tiny_imagenet.npz", x=pixels, y=labels)
    for name in (*IDX, BIN, PY, "png/a", "jpeg/a", "bmp/a", "webp/a"):
        (root / name).parent.mkdir(exist_ok=True)
    for name, array in zip(IDX, (pixels, labels.astype(np.uint8)), strict=True):
        head = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
        (root / name).write_bytes(head + array.tobytes())
        (root / f"gz/{name}.gz").parent.mkdir(parents=True, exist_ok=True)
        (root / f"gz/{name}.gz").write_bytes(gzip.compress(head + array.tobytes()))
    batch = np.arange(4 * 3073).reshape(4, 3073) % 7
    batch = batch.astype(np.uint8)
    (root / BIN).write_bytes(batch.tobytes())
    (root / "py").mkdir()
    (root / "cifar-10-batches-py").rename(root / "py/cifar-10-batches-py")
    pickled = {b"data": batch[:, 1:], b"labels": [0, 1, 2, 3]}
    (root / "py" / PY).write_bytes(pickle.dumps(pickled, protocol=2))
    for kind in ("png", "jpeg", "bmp", "webp"):
        Image.fromarray(pixels[0]).convert("RGB").save(root / f"{kind}/a.{kind}")
    (root / "card.yaml").write_text("shape: [3, 4, 4]\nrange: [0, 1]\nmean: [0.1, 0.2, 0.3]\n")
    (root / "recipe.yaml").write_text("lr: 0.1\nsteps: [3, 4]\noptimizer: adam\nfrozen: [a, b]\n")
    random_features(data.load("digits", 3), 200).save(root / "rf")
    exhume_("victim", "sphere", "--dim", 6, "--samples", 3, "--out", root / "drawn")
    two_layer(data.sphere(6, 3), 12, until=1e-2).save(root / "net")
    words = ("--samples", 3, "--device", "cpu", "--product-limit", 20, "--out", root / "run")
    exhume_("audit", root / "rf", *words)
    exhume_("score", root / "run", "--truth", root / "rf" / TRUTH)
    kept = RunFolder(root / "run")
    seen: list[progress.Progress] = []
    reconstruct(kept.settings.open().problem, 3, 0, observe=lambda state, _: seen.append(state))
    kept.save(seen[0], 1.0)
    with store.held(root / "sweep"):
        record = store.Record(Square(1.0), {"y": 1.0}, None, 1.0)
        store.write(root / "sweep", store.address_of(Square(1.0)), record)
    return root


def _loaded(name: str, **options: Any) -> Callable[[Path], object]:
    return lambda folder: data.load(name, 2, classes="random", root=folder, **options)


def _shown(run: Path) -> None:
    """Read all of a run folder, and say what a report says; it is drawn now and then."""
    folder = read_run(run)
    _ = folder.settings, folder.events, folder.sizes, folder.matched(), model(folder)
    cards(folder)
    if random.random() < 0.05:
        report.write(run)


def _continued(run: Path) -> None:
    problem = open_model(Source(str(run.parent / "rf"))).problem
    progress.unpack(problem, _read_checkpoint(run / CHECKPOINT))


RUN = ("result.json", "score.json", "events.jsonl", "config.yaml", "candidates.safetensors")
# The file that is changed, and what reads it, given the folder or the file
READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("w.safetensors", "w.pt", "old.pt"), read_state),
    "hf/model.safetensors.index.json": lambda file: read_state(file.parent),
    "hf/a.safetensors": lambda file: read_state(file.parent),
    "v.npy": lambda file: Mapped(file).rows(0, 3),
    "fashion_mnist.npz": lambda file: _loaded("fashion_mnist")(file.parent),
    "tiny_imagenet.npz": lambda file: _loaded("tiny_imagenet")(file.parent),
    **dict.fromkeys(IDX, lambda file: _loaded("mnist")(file.parents[1])),
    f"gz/{IDX[0]}.gz": lambda file: _loaded("mnist")(file.parents[1]),
    BIN: lambda file: _loaded("cifar10")(file.parents[1]),
    f"py/{PY}": lambda file: _loaded("cifar10")(file.parents[1]),
    **{f"{kind}/a.{kind}": lambda file: read_images(file.parent, (3, 8, 8))
       for kind in ("png", "jpeg", "bmp", "webp")},
    "card.yaml": lambda file: read_card(file).domain(),
    "recipe.yaml": lambda file: recipes.read(file),
    f"rf/{TRUTH}": data.read,
    **dict.fromkeys(
        (f"rf/{CARD}", f"rf/{TRAINED}", f"drawn/{CARD}", *(f"net/{x}" for x in (CARD, INITIAL))),
        lambda file: open_model(Source(str(file.parent)), check=False),
    ),
    **{f"run/{name}": lambda file: _shown(file.parent) for name in (*RUN, "matched.safetensors")},
    f"run/{CHECKPOINT}": lambda file: _continued(file.parent),
    "sweep/cells/*.json": lambda file: store.read(file.parents[1], file.stem, Square(1.0)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of numpy, on odd headers: what matters is what is raised
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_file_is_read_or_refused(name: str, good: Path) -> None:
    (file,), faults = list(good.glob(name)), dict[str, str]()
    READERS[name](file)  # it is good
    content, before = file.read_bytes(), peak(anew=True)
    for number in range(max(1, EXAMPLES // len(READERS))):
        random.seed(number)
        file.write_bytes(mutated(content, random.Random(f"{name} {number}")))
        try:
            READERS[name](file)
        except InputError as error:
            assert str(error), number
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
            faults.setdefault(place, f"example {number}: {traceback.format_exc()}")
    file.write_bytes(content)
    assert not faults, f"{len(faults)} kinds of fault\n" + "\n".join(faults.values())
    assert peak() - before < 2 * len(content) + ROOM


def _png(width: int, height: int) -> bytes:
    """A picture that says it is so large, and holds a few bytes."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), b"IDATx", b"IEND")
    parts = (struct.pack(">I", len(x) - 4) + x + struct.pack(">I", zlib.crc32(x)) for x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _npz(**shapes: str) -> bytes:
    """Arrays whose headers ask for more than there is."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, shape in shapes.items():
            head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
            magic = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head))
            archive.writestr(f"{name}.npy", magic + head + b"0" * 64)
    return file.getvalue()


def _saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


LAUGHS = "\n".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 12))
SEEDED = {"kind": "random_features", "width": 200, "dim": 10**9, "outputs": 10, "shape": [10**9]}
SEEDED |= {"activation": "relu", "first": {"source": "seed", "seed": 0}}
DEEP = {"name": "mlp", "arguments": {"shape": [10**6, 10**6], "widths": [10**9]}}
HEAD = struct.pack(">I3I", 0x803, 9, 8, 8)
BOMBS = {  # the file whose place it takes, what it holds, and what is said
    "nine bytes": (f"py/{PY}", b"\x80\x02]r\xff\xff\xff\x0f.", "more memory"),
    "bytes": (f"py/{PY}", b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "safely"),
    "picture": ("png/a.png", _png(9000, 9000), "9000 × 9000"),
    "program": ("jpeg/a.jpeg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "cannot be"),
    "gzip": (f"gz/{IDX[0]}.gz", gzip.compress(HEAD + bytes(1 << 26)), "too long"),
    "sizes": (f"gz/{IDX[0]}.gz", gzip.compress(HEAD[:8] + b"\xff" * 8), "cut short"),
    "array": ("fashion_mnist.npz", _npz(x="(9999999999999,)", y="(1,)"), "bytes for"),
    "negative": ("fashion_mnist.npz", _npz(x="(-8, -8)", y="(1,)"), "bytes for"),
    "laughs": ("card.yaml", f"x0: &x0 [1]\n{LAUGHS}".encode(), "alias"),
    "input": ("card.yaml", b"shape: [1000000, 1000000]", "numbers"),
    "seed": (f"rf/{CARD}", json.dumps(SEEDED).encode(), "numbers"),
    "network": (
        f"net/{CARD}",
        json.dumps({"kind": "network", "architecture": DEEP}).encode(),
        "card.json|expected",
    ),
    "strides": ("w.pt", _saved({"w": torch.zeros(1).expand(10**11)}), "larger than its file"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_takes_little_memory(bomb: str, good: Path) -> None:
    name, content, words = BOMBS[bomb]
    (file,) = good.glob(name)
    before, held = file.read_bytes(), peak(anew=True)
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=words):
            READERS[name](file)
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        file.write_bytes(before)
    assert max(traced, peak() - held) < ROOM // 4
