"""`exhume law`: the phase diagram of data reconstruction."""

import inspect
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exhume.cli.console import new_console, table
from exhume.errors import InputError
from exhume.files import LOCK

if TYPE_CHECKING:
    from exhume.experiments.law import Law

STEPS = 12  # how many ratios a:b stands for: enough to see where a curve rises
FILES = ("law.png", "law.svg", "law.html", "table.csv", "cells", "sweep.json")  # of a sweep


def law(
    data: str = "sphere",
    dim: str | None = None,
    samples: str = "12",
    ratios: str = "0.2:10",
    seeds: int = 5,
    methods: str | None = None,
    activations: str = "relu",
    architectures: str = "random_features",
    losses: str = "squared",
    ranks: str | None = None,
    size: int | None = None,
    classes: str | None = None,
    products: int = 30_000,
    engine: str = "loky",
    address: str | None = None,
    workers: int | None = None,
    device: str = "cpu",
    out: Path = Path("runs/law"),
    retry: bool = False,
    redact: bool = False,
) -> None:
    """Sweep over the ratio p/(dn), and draw where labels fit and where data come back.

    Every model is trained, attacked without its data, and only then compared with it. Where an
    option takes several values, write them with commas: every combination is run. The same command
    again goes on where it was stopped.

    Args:
        data: sphere, digits, faces, photos, or (from the folder EXHUME_DATA) cifar10, mnist,
            fashion_mnist, tiny_imagenet.
        dim: d, for sphere; one or several.
        samples: n; one or several.
        ratios: p·m/(d·n): 0.2:10 are 12 values on a logarithmic axis, 0.2:10:20 are 20, or
            values with commas.
        seeds: how many, each of data, model and attack alike.
        methods: of attack; exhume,iurada2025 (ours and the published momentum), or with --ranks
            exhume,tansley2026. In random features tansley2026 is told the subspace that the data
            lie in ("subspace told"), elsewhere it estimates it ("subspace estimated").
        activations: relu, relu+tanh, tanh, gelu, erf, softplus, or polynomial:c0,c1,…
        architectures: random_features, two_layer, resnet, vit.
        losses: squared, logistic, cross_entropy.
        ranks: of the random subspaces that sphere data lies in.
        size: side that images are shrunk to.
        classes: of images: all, parity, vehicles (cifar10), random.
        products: most passes over the features an attack may make; no clock, so results repeat.
        engine: loky (this machine), dask or ray (a cluster that is running).
        address: of the cluster.
        workers: how many cells at a time; all cores if left out.
        device: where cells run.
        out: folder for the cells, the figure (PNG, SVG), the page and the table (CSV).
        retry: run the cells again that failed.
        redact: keep and draw no picture of a sample.
    """
    given = dict(locals())
    cells = planned(given).cells()
    check_folder(out)

    from exhume import sweep
    from exhume.device import usable_device
    from exhume.experiments import page
    from exhume.experiments.law import HEADINGS

    options = {"engine": engine, "address": address, "workers": workers, "retry": retry}
    options["device"] = usable_device(device) if engine == "loky" else device
    console = new_console()
    with sweep.progress(console, len(cells)) as show:
        summary = page.perform(cells, out, _command(given), redact, **options, show=show)
    curves = (*summary.fits, *summary.attacks)
    for curve in curves:
        console.print(curve.sentence, markup=False)
    console.print(table(HEADINGS, (curve.row for curve in curves)))
    if summary.failed:
        failed = f"{len(summary.failed)} of {len(cells)} cells failed, the first one with"
        again = "run the same command with --retry to try again"
        console.print(f"{failed} {summary.failed[0].error}; {again}", markup=False)
    console.print(f"page: {out / 'law.html'}", markup=False)


def planned(given: dict[str, Any]) -> "Law":
    """Return the sweep that the options ask for."""
    from exhume.experiments.cells.attack import SUBSPACE
    from exhume.experiments.law import MOMENTUM, OURS, Law

    methods, dim, ranks = given["methods"], given["dim"], given["ranks"]
    default = (OURS, MOMENTUM if ranks is None else SUBSPACE)
    rest: dict[str, Any] = {w: given[w] for w in ("data", "seeds", "products", "size", "classes")}
    rest |= {w: words(w, given[w]) for w in ("activations", "architectures", "losses")}
    return Law(
        dims=(None,) if dim is None else whole_numbers("dim", dim),
        samples=whole_numbers("samples", given["samples"]),
        ranks=(None,) if ranks is None else whole_numbers("ranks", ranks),
        ratios=spaced("ratios", given["ratios"]),
        methods=default if methods is None else words("methods", methods),
        pictures=given["data"] != "sphere" and not given["redact"],
        **rest,
    )


def spaced(option: str, text: str) -> tuple[float, ...]:
    """Read positive numbers: a:b or a:b:k on a logarithmic axis, or with commas.

    Example:
        >>> spaced("ratios", "0.1:10:3"), spaced("ratios", "2,5"), len(spaced("ratios", "0.2:10"))
        ((0.1, 1.0, 10.0), (2.0, 5.0), 12)
    """
    from exhume.sweep import MOST

    spread = 0 < text.count(":") < 3
    parts = f"{text}:{STEPS}".split(":")[:3] if spread else [*text.split(","), "2"]
    try:
        numbers, count = [float(x) for x in parts[:-1]], int(parts[-1])
        rising = not spread or numbers[0] < numbers[1]
        if not rising or count < 2 or not all(0 < x < math.inf for x in numbers):
            raise ValueError
    except ValueError:
        raise InputError(
            f"{option}: expected numbers above 0 such as 0.2:10, 0.2:10:20 or 0.5,1,2, in a range "
            f"the first below the second and 2 or more of them, got {text!r}."
        ) from None
    if not spread:
        return tuple(sorted(numbers))
    if count > MOST:
        raise InputError(f"{option}: {count:,} of them are more than the {MOST:,} of a sweep.")
    step = math.log(numbers[1] / numbers[0]) / (count - 1)
    return tuple(float(f"{numbers[0] * math.exp(step * k):.6g}") for k in range(count))


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers with commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option}: expected whole numbers with commas, got {text!r}.") from None


def words(option: str, text: str) -> tuple[str, ...]:
    """Read words with commas; those inside a polynomial are part of it.

    Example:
        >>> words("activations", "relu,polynomial:0,0,1,tanh")
        ('relu', 'polynomial:0,0,1', 'tanh')
    """
    found = tuple(part.strip() for part in re.split(r",(?=\s*(?:[a-z]|,|$))", text))
    if not all(found):
        raise InputError(f"{option}: expected words with commas, got {text!r}.")
    return found


def check_folder(out: Path) -> None:
    """Refuse a folder that holds anything but a sweep of the law."""
    if out.is_file():
        raise InputError(f"{out}: is a file; choose another --out.")
    # What a process that was killed leaves: of a write, see files.py, and the lock of the driver
    left = *(f".{name}." for name in FILES), LOCK
    names = sorted(path.name for path in out.glob("*"))
    if other := [name for name in names if name not in FILES and not name.startswith(left)]:
        raise InputError(f"{out}: holds something else ({other[0]}); choose another --out.")


def _command(given: dict[str, Any]) -> str:
    """Return the command line that says the same, without what is the default."""
    said = ["exhume", "law"]
    for name, parameter in inspect.signature(law).parameters.items():
        value = given[name]
        if isinstance(value, bool):
            said += [f"--{name}"] if value else []
        elif name in ("data", "ratios", "samples", "seeds") or value != parameter.default:
            said += [f"--{name}", str(value)]
    return shlex.join(said)
