"""`exhume bound`: what theory says of a width, or of a checkpoint, before any attack."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exhume.cli.console import console as _console
from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SAMPLES = (1, 10, 100, 1000, 10_000)
"""Numbers of samples that the safe width is given for, where none is asked for."""

ORDERS = 8
"""Hermite coefficients that are shown."""

COUNTS = (
    "counts compare equations with unknowns for features in general position: below the threshold "
    "a continuum of data sets explains the weights, though single samples may still leak; above it "
    "nothing is promised, to either side",
    "samples have a known norm, and one coefficient for each output",
)
SPAN = (
    "the samples' span is what the change of a dense first layer shows, if that was trained by "
    "gradient descent without decay; random features do not show it"
)
LAST = (
    "a safe width is one for the last layer alone: the other blocks have equations of their own, "
    "and knowing what samples look like makes up for equations"
)


TRAINED = "it is for random features, and the layers below the last one were trained here."


@dataclass(frozen=True)
class _Sizes:
    """What is asked about; shapes of the trained parameters where there is a checkpoint."""

    dim: int
    outputs: int
    width: int | None
    activation: str | None
    shapes: dict[str, tuple[int, ...]] | None = None
    head: str | None = None


def bound(
    model: str | None = None,
    trained: str | None = None,
    arguments: dict[str, Any] | None = None,
    input_shape: int | list[int] | None = None,
    head: str | None = None,
    dim: int | None = None,
    samples: int | None = None,
    width: int | None = None,
    outputs: int | None = None,
    subspace: int | None = None,
    activation: str | None = None,
    tolerance: float = 0.1,
    separation: float = 0.5,
    floor: float = 0.1,
    ceiling: float = 1.0,
    failure: float = 0.05,
    rho: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    out: Path | None = None,
) -> None:
    """Say what theory knows of a width: thresholds, guarantees, signs, privacy.

    Of sizes, `exhume bound --dim 3072 --samples 100 --width 3072000`, or of a checkpoint, a model
    folder or your own: how many samples each block of parameters could give up, and what width
    would be safe.

    Args:
        model: folder of a model (here the word --model may be left out); or
            package.module:factory or path/file.py:factory. Its code is run.
        trained: weights of a factory's model.
        arguments: of the factory, as JSON.
        input_shape: of one input of a factory's model, such as 3,32,32.
        head: name of its last linear layer; found if left out.
        dim: of an input, where there is no model.
        samples: of the training; a model can do without.
        width: of what the last layer is given, where there is no model.
        outputs: where there is no model; 1.
        subspace: dimension of a subspace that the attacker knows the samples to lie in.
        activation: relu (the default where there is no model), relu+tanh, tanh, gelu, erf,
            softplus, or polynomial:c0,c1,…
        tolerance: distance, over √d, within which a sample counts as found.
        separation: least distance, over √d, between two samples.
        floor: least size of a sample's coefficient, in any unit; the guarantee depends on how far
            it is from the largest alone.
        ceiling: largest size of one, also of the attack's.
        failure: probability that the guarantee may fail.
        rho: of a training that is ρ-zCDP.
        epsilon: of one that is (ε, δ)-DP.
        delta: likewise; 0 if left out.
        out: new JSON file for all that is found.
    """
    from exhume.files import check_new, write_json

    if out is not None:
        check_new(out)
    private = _rho(rho, epsilon, delta)
    given = {"dim": dim, "width": width, "outputs": outputs}
    own = {"trained": trained, "arguments": arguments, "input_shape": input_shape, "head": head}
    if model is None:
        _refuse(own, "is for a model; name it with --model, or leave this out")
        sizes = _plain_sizes(dim, samples, width, outputs, activation)
    else:
        _refuse(given, "a model has its own; leave it out")
        sizes = _model_sizes(model, trained, arguments, input_shape, head, activation)
    _check(sizes, samples, subspace)
    found: dict[str, Any] = {
        "sizes": {
            **{"dim": sizes.dim, "outputs": sizes.outputs, "width": sizes.width},
            **{"samples": samples, "subspace": subspace, "activation": sizes.activation},
        }
    }
    assumptions = [*COUNTS, SPAN]
    if samples is not None and sizes.head is not None:
        found["guarantee"] = {"none": TRAINED}
    elif samples is not None and sizes.activation is not None:
        found["guarantee"], more = _guarantee(
            sizes, samples, subspace, tolerance, separation, floor, ceiling, failure
        )
        assumptions += more
    if samples is not None:
        found["counting"] = _counting(sizes, samples, subspace)
    if sizes.shapes is not None:
        found |= _blocks(sizes, samples)
        assumptions.append(LAST)
    if sizes.activation is not None:
        found["hermite"] = _hermite(sizes.activation)
    if private is not None:
        found["privacy"], more = _privacy(private, subspace or sizes.dim, rho is not None, delta)
        assumptions += more
    found["assumptions"] = assumptions
    console = _console()
    _show(console, found)
    if out is not None:
        write_json(out, found)
        console.print(f"written: {out}", markup=False)


def _refuse(options: dict[str, Any], why: str) -> None:
    for word, value in options.items():
        if value is not None:
            raise InputError(f"{word}: {why}.")


def _plain_sizes(
    dim: int | None,
    samples: int | None,
    width: int | None,
    outputs: int | None,
    activation: str | None,
) -> _Sizes:
    """Sizes as the user gives them; the width may be left out."""
    if dim is None or samples is None:
        raise InputError(
            "dim and samples: are needed, such as exhume bound --dim 3072 --samples 100 --width "
            "3072000; or name a model folder, exhume bound FOLDER, or a factory, --model "
            "package.module:factory, with --trained."
        )
    return _Sizes(dim, 1 if outputs is None else outputs, width, activation or "relu")


def _model_sizes(
    model: str,
    trained: str | None,
    arguments: dict[str, Any] | None,
    input_shape: int | list[int] | None,
    head: str | None,
    activation: str | None,
) -> _Sizes:
    """Sizes of a model folder, or of a factory's model whose trained weights fit it."""
    if trained is not None:
        return _factory_sizes(model, trained, arguments, input_shape, head, activation)
    if ":" in model and not Path(model).exists():
        raise InputError(f"model {model!r}: is a factory; give its weights with --trained.")
    own = {"arguments": arguments, "input_shape": input_shape, "head": head}
    _refuse(own, f"{model} is a model folder, which has its own; leave it out")
    return _folder_sizes(Path(model), activation)


def _folder_sizes(folder: Path, activation: str | None) -> _Sizes:
    from exhume.features.random import RandomFeatures
    from exhume.files import read_json
    from exhume.models.folder import CARD, read_model, read_network

    card = read_json(folder / CARD) if (folder / CARD).is_file() else None
    if isinstance(card, dict) and card.get("kind") == "network":
        found = read_network(folder)
        network = found.network
        shapes = {name: tuple(w.shape) for name, w in network.module.named_parameters()}
        return _Sizes(
            network.dim,
            network.outputs,
            shapes[network.head_weight][1],
            activation or found.arguments.get("activation"),
            shapes,
            network.head,
        )
    problem = read_model(folder)
    features, m = problem.features, problem.target.shape[1]
    name = features.activation.name if isinstance(features, RandomFeatures) else None
    if activation not in (None, name):
        raise InputError(f"activation: that of {folder} is {name}, not {activation}; leave it out.")
    return _Sizes(features.dim, m, features.width, name, {"last layer": (features.width, m)})


def _factory_sizes(
    model: str,
    trained: str,
    arguments: dict[str, Any] | None,
    input_shape: int | list[int] | None,
    head: str | None,
    activation: str | None,
) -> _Sizes:
    from exhume.models.factory import load_factory
    from exhume.models.prepare import prepare
    from exhume.models.state import fit_state, read_state

    if input_shape is None:
        raise InputError("input_shape: give the shape of one input, such as 3,32,32.")
    shape = (input_shape,) if isinstance(input_shape, int) else tuple(input_shape)
    state = read_state(Path(trained))
    prepared = prepare(load_factory(model, arguments), shape, head, check=False)
    fit_state(state, prepared.module, trained)
    shapes = {name: tuple(w.shape) for name, w in prepared.module.named_parameters()}
    weight = f"{prepared.head}.weight" if prepared.head else "weight"
    width = shapes[weight][1]
    return _Sizes(math.prod(shape), prepared.outputs, width, activation, shapes, prepared.head)


def _check(sizes: _Sizes, samples: int | None, subspace: int | None) -> None:
    """Refuse sizes that cannot be, and an activation of no known name."""
    from exhume.features.activations import activation
    from exhume.theory.counting import label_fitting, unknowns

    unknowns(sizes.dim, 1 if samples is None else samples, sizes.outputs, subspace)
    if sizes.width is not None and sizes.width < 1:
        raise InputError(f"width: expected a whole number above 0, got {sizes.width}.")
    if sizes.activation is not None:
        activation(sizes.activation)
    if samples is not None:
        label_fitting(samples)


def _rho(rho: float | None, epsilon: float | None, delta: float | None) -> float | None:
    """ρ as it is given, or from ε and δ."""
    from exhume.theory.privacy import rho_of

    if rho is not None and epsilon is not None:
        raise InputError("rho and epsilon: give one of them.")
    if delta is not None and epsilon is None:
        raise InputError("delta: goes with --epsilon.")
    if epsilon is not None:
        return rho_of(epsilon, delta or 0.0)
    if rho is not None and not (math.isfinite(rho) and rho > 0):
        raise InputError(f"rho: expected a finite number above 0, got {rho}.")
    return rho


def _counting(sizes: _Sizes, samples: int, subspace: int | None) -> dict[str, Any]:
    """Thresholds by name, and where the width stands."""
    from exhume.theory.counting import label_fitting, reconstruction

    thresholds = {"label fitting": label_fitting(samples)}
    if subspace is not None:
        thresholds[f"reconstruction in {subspace} known dimensions"] = reconstruction(
            sizes.dim, samples, sizes.outputs, subspace
        )
    spanned = reconstruction(sizes.dim, samples, sizes.outputs, "span")
    thresholds["reconstruction in the samples' span"] = spanned
    thresholds["reconstruction in full space"] = reconstruction(sizes.dim, samples, sizes.outputs)
    record: dict[str, Any] = {"thresholds": thresholds}
    if sizes.width is not None:
        ratios = {name: sizes.width / least for name, least in thresholds.items()}
        record |= {"ratios": ratios, "verdict": _verdict(sizes.width, thresholds)}
    return record


def _verdict(width: int, thresholds: dict[str, int]) -> str:
    reached = [name for name, least in thresholds.items() if width >= least]
    if len(reached) == len(thresholds):
        return (
            f"Width {width:,} has as many equations as unknowns even in full space: counting does "
            "not protect the samples."
        )
    if any(name != "label fitting" for name in reached):
        where = next(name for name in reached if name != "label fitting")
        return (
            f"Width {width:,} has as many equations as unknowns for {where}, and fewer in full "
            "space: it depends on whether the attacker knows where the samples lie."
        )
    fitted = "fits any labels, but has" if reached else "is too narrow to fit any labels, and has"
    return (
        f"Width {width:,} {fitted} fewer equations than unknowns: a continuum of data sets "
        "explains the weights, and not all samples can be recovered from the last layer alone."
    )


def _guarantee(
    sizes: _Sizes,
    samples: int,
    subspace: int | None,
    tolerance: float,
    separation: float,
    floor: float,
    ceiling: float,
    failure: float,
) -> tuple[dict[str, Any], list[str]]:
    """The width from which exact solutions are the samples; or why there is none."""
    from exhume.theory.width import NoBoundError, width_bound

    try:
        bounded = width_bound(
            samples,
            sizes.dim,
            sizes.activation or "relu",
            subspace,
            tolerance,
            separation,
            floor,
            ceiling,
            failure,
        )
    except NoBoundError as error:
        return {"none": str(error)}, []
    record = asdict(bounded)
    more = [f"guarantee: {sentence}" for sentence in record.pop("assumptions")]
    if sizes.outputs > 1:
        more.append("guarantee: it is for one output alone, the others help")
    if sizes.width is not None:
        record["failure_at_width"] = bounded.failure_at(sizes.width)
        record["failure_at_width_numerical"] = bounded.failure_at(sizes.width, numerical=True)
    return record, more


def _blocks(sizes: _Sizes, samples: int | None) -> dict[str, Any]:
    """What each block could give up, and safe widths."""
    from exhume.theory.counting import blocks, safe_width

    shapes = sizes.shapes or {}
    listed = [asdict(block) for block in blocks(shapes, sizes.dim, sizes.outputs, sizes.head)]
    safe = [
        {
            "samples": n,
            "full_space": safe_width(sizes.dim, n, sizes.outputs),
            "span": safe_width(sizes.dim, n, sizes.outputs, "span"),
        }
        for n in (SAMPLES if samples is None else (samples,))
    ]
    return {"blocks": listed, "safe_widths": safe}


def _hermite(name: str) -> dict[str, Any]:
    from exhume.theory.hermite import coefficients, sign_ambiguity

    found = coefficients(name, ORDERS)
    return {
        "coefficients": found.values.tolist(),
        "error": found.error,
        "energy": found.energy,
        "share_above": found.rest,
        "sign": asdict(sign_ambiguity(name)),
    }


def _privacy(
    rho: float, dim: int, told: bool, delta: float | None
) -> tuple[dict[str, Any], list[str]]:
    """The least error of any attack at ρ, for samples of which the attacker knows nothing."""
    from exhume.theory.privacy import error_bound, rho_at_error, sphere_error_bound

    record = {
        "rho": rho,
        "told": told,
        "dim": dim,
        "error_gaussian": error_bound(rho, dim),
        "error_sphere": sphere_error_bound(rho, dim) if dim > 1 else None,
        "rho_at_half": rho_at_error(0.5, dim),
    }
    more = [
        "privacy: one sample is unknown, all others are known to the attacker; the sample is "
        "isotropic Gaussian, or uniform on a sphere, in those dimensions, so that data which are "
        "easier to guess have less protection"
    ]
    if delta:
        more.append(
            "privacy: (ε, δ) was computed from ρ by ε = ρ + 2√(ρ ln(1/δ)); a tighter accountant "
            "allows a larger ρ for the same ε, and (ε, δ) alone implies none"
        )
    return record, more


def _show(console: "Console", found: dict[str, Any]) -> None:
    """All that was found, table by table."""
    if "counting" in found:
        console.print(_counting_table(found["counting"]))
        if "verdict" in found["counting"]:
            console.print(found["counting"]["verdict"], markup=False)
    if "blocks" in found:
        console.print(_block_table(found["blocks"]))
        console.print(_safe_table(found["safe_widths"]))
    if "guarantee" in found:
        _show_guarantee(console, found["guarantee"], found["sizes"])
    if "hermite" in found:
        _show_hermite(console, found["hermite"], found["sizes"]["activation"])
    if "privacy" in found:
        _show_privacy(console, found["privacy"])
    console.print("assumptions:")
    for sentence in found["assumptions"]:
        console.print(f"- {sentence}", markup=False)


def _counting_table(record: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("counting", "least width", "this width ÷ it")
    for name, least in record["thresholds"].items():
        ratio = f"{record['ratios'][name]:.3g}" if "ratios" in record else "–"
        table.add_row(name, f"{least:,}", ratio)
    return table


def _block_table(blocks: list[dict[str, Any]]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table("block", "shape", "parameters", "share", "samples at most", "span known")
    for block in blocks:
        shape = "" if block["shape"] is None else " × ".join(map(str, block["shape"]))
        table.add_row(
            escape(block["name"]),
            shape,
            f"{block['parameters']:,}",
            f"{block['share']:.1%}",
            f"{block['samples']:,}",
            f"{block['spanned']:,}",
        )
    return table


def _safe_table(safe: list[dict[str, int]]) -> "Table":
    from rich.table import Table

    table = Table("samples", "safe width of the last layer", "span known")
    for row in safe:
        table.add_row(*(f"{row[word]:,}" for word in ("samples", "full_space", "span")))
    return table


def _show_guarantee(console: "Console", record: dict[str, Any], sizes: dict[str, Any]) -> None:
    from rich.table import Table

    if "none" in record:
        console.print(f"no guarantee: {record['none']}", markup=False)
        return
    width, unknowns = sizes["width"], sizes["samples"] * (sizes["subspace"] or sizes["dim"])
    table = Table("guarantee", "width from which it holds", "÷ (samples × dimension)")
    for name, word in (
        ("by Hoeffding's inequality, as in the paper", "hoeffding"),
        ("by one equation that is violated", "certified"),
        ("the same, its constant found by a search: no certificate", "numerical"),
    ):
        table.add_row(name, f"{record[word]:,.3g}", f"{record[word] / unknowns:,.3g}")
    console.print(table)
    console.print(
        f"with probability {1 - record['failure']:g}; kernel gap {record['gap']:.2e}, log of the "
        f"covering {record['log_covering']:,.0f}"
    )
    if width is not None:
        console.print(
            f"at width {width:,} it may fail with probability {record['failure_at_width']:.2g}, "
            f"by the numerical constant {record['failure_at_width_numerical']:.2g}"
        )


def _show_hermite(console: "Console", record: dict[str, Any], name: str) -> None:
    from rich.table import Table

    table = Table("order", f"Hermite coefficient of {name}", "share of the energy")
    for k, h in enumerate(record["coefficients"]):
        shown = f"{h:.6f}" if abs(h) > record["error"] else "0"
        share = h * h / record["energy"] if record["energy"] else 0.0
        table.add_row(str(k), shown, f"{share:.2%}")
    table.add_row("above", "", f"{record['share_above']:.2%}")
    console.print(table)
    sign = record["sign"]
    console.print(f"the sign of a sample is {sign['verdict']}: {sign['reason']}", markup=False)


def _show_privacy(console: "Console", record: dict[str, Any]) -> None:
    sphere = record["error_sphere"]
    given = "" if record["told"] else ", if ε and δ come from that ρ,"
    on_sphere = "" if sphere is None else f" ({sphere:.3g} on a sphere)"
    console.print(
        f"privacy: at ρ = {record['rho']:.3g}{given} no attack has a mean relative error "
        f"E‖x − x̂‖²/E‖x‖² below {record['error_gaussian']:.3g}{on_sphere} in {record['dim']:,} "
        f"dimensions; an error of 0.5 is out of reach below ρ = {record['rho_at_half']:,.3g}",
        markup=False,
    )
