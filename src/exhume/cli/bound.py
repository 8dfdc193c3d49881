"""`exhume bound`: what theory says of a width, or of a checkpoint, before any attack."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from exhume.cli.console import console as _console
from exhume.errors import InputError
from exhume.features.random import RandomFeatures
from exhume.files import check_new, write_json
from exhume.models.card import DataCard
from exhume.models.opening import Source, open_model, open_network
from exhume.theory.overview import Privacy, Sizes, overview


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
        delta: of the same; 0 if left out.
        out: new JSON file for all that is found.
    """
    if out is not None:
        check_new(out)
    privacy = Privacy.of(rho, epsilon, delta)
    given = {"dim": dim, "width": width, "outputs": outputs}
    if model is None:
        own = {"trained": trained, "arguments": arguments, "input_shape": input_shape, "head": head}
        _refuse(own, "is for a model; name it with --model, or leave this out")
        if dim is None or samples is None:
            raise InputError(
                "dim and samples: are needed, such as exhume bound --dim 3072 --samples 100 "
                "--width 3072000; or name a model folder, exhume bound FOLDER, or a factory, "
                "--model package.module:factory, with --trained."
            )
        sizes = Sizes(
            dim, 1 if outputs is None else outputs, width, activation or "relu", samples, subspace
        )
    else:
        _refuse(given, "a model has its own; leave it out")
        card = None if input_shape is None else DataCard.of({}, shape=_shape(input_shape))
        source = Source(model, trained, card=card, arguments=arguments, head=head)
        sizes = _model_sizes(source, activation, samples, subspace)
    conditions = {"tolerance": tolerance, "separation": separation, "floor": floor}
    conditions |= {"ceiling": ceiling, "failure": failure}
    found = overview(sizes, conditions, privacy)
    console = _console()
    _show(console, found)
    if out is not None:
        write_json(out, found)
        console.print(f"written: {out}", markup=False)


def _refuse(options: dict[str, Any], why: str) -> None:
    for word, value in options.items():
        if value is not None:
            raise InputError(f"{word}: {why}.")


def _shape(sizes: int | list[int]) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _model_sizes(
    source: Source, activation: str | None, samples: int | None, subspace: int | None
) -> Sizes:
    """The sizes of a network, or of a folder of random features."""
    found = open_network(source)
    if found is not None:
        network, known = found
        shapes = {name: tuple(w.shape) for name, w in network.module.named_parameters()}
        return Sizes(
            network.dim,
            network.outputs,
            shapes[network.head_weight][1],
            activation or known,
            samples,
            subspace,
            shapes,
            network.head,
        )
    problem = open_model(source).problem
    features, m = problem.features, problem.target.shape[1]
    name = features.activation.name if isinstance(features, RandomFeatures) else None
    if activation not in (None, name):
        raise InputError(
            f"activation: that of {source.model} is {name}, not {activation}; leave it out."
        )
    shapes = {"last layer": (features.width, m)}
    return Sizes(features.dim, m, features.width, name, samples, subspace, shapes)


def _show(console: Console, found: dict[str, Any]) -> None:
    """All that was found, table by table."""
    if "counting" in found:
        _show_counting(console, found["counting"])
    if "blocks" in found:
        console.print(_block_table(found["blocks"]))
        safe = Table("samples", "safe width of the last layer", "span known")
        for row in found["safe_widths"]:
            safe.add_row(*(f"{row[word]:,}" for word in ("samples", "full_space", "span")))
        console.print(safe)
    if "guarantee" in found:
        _show_guarantee(console, found["guarantee"], found["sizes"])
    if "hermite" in found:
        _show_hermite(console, found["hermite"], found["sizes"]["activation"])
    if "privacy" in found:
        _show_privacy(console, found["privacy"])
    console.print("assumptions:")
    for sentence in found["assumptions"]:
        console.print(f"- {sentence}", markup=False)


def _show_counting(console: Console, record: dict[str, Any]) -> None:
    table = Table("counting", "least width", "this width ÷ it")
    for name, least in record["thresholds"].items():
        ratio = f"{record['ratios'][name]:.3g}" if "ratios" in record else "–"
        table.add_row(name, f"{least:,}", ratio)
    console.print(table)
    if "verdict" in record:
        console.print(record["verdict"], markup=False)


def _block_table(blocks: list[dict[str, Any]]) -> Table:
    table = Table("block", "shape", "parameters", "share", "samples at most", "span known")
    for block in blocks:
        table.add_row(
            escape(block["name"]),
            "" if block["shape"] is None else " × ".join(map(str, block["shape"])),
            f"{block['parameters']:,}",
            f"{block['share']:.1%}",
            f"{block['samples']:,}",
            f"{block['spanned']:,}",
        )
    return table


def _show_guarantee(console: Console, record: dict[str, Any], sizes: dict[str, Any]) -> None:
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


def _show_hermite(console: Console, record: dict[str, Any], name: str) -> None:
    table = Table("order", f"Hermite coefficient of {name}", "share of the energy")
    for k, h in enumerate(record["coefficients"]):
        shown = f"{h:.6f}" if abs(h) > record["error"] else "0"
        share = h * h / record["energy"] if record["energy"] else 0.0
        table.add_row(str(k), shown, f"{share:.2%}")
    table.add_row("above", "", f"{record['share_above']:.2%}")
    console.print(table)
    sign = record["sign"]
    console.print(f"the sign of a sample is {sign['verdict']}: {sign['reason']}", markup=False)


def _show_privacy(console: Console, record: dict[str, Any]) -> None:
    sphere = record["error_sphere"]
    given = "" if record["told"] else ", if ε and δ come from that ρ,"
    on_sphere = "" if sphere is None else f" ({sphere:.3g} on a sphere)"
    console.print(
        f"privacy: at ρ = {record['rho']:.3g}{given} no attack has a mean relative error "
        f"E‖x − x̂‖²/E‖x‖² below {record['error_gaussian']:.3g}{on_sphere} in {record['dim']:,} "
        f"dimensions; an error of 0.5 is out of reach below ρ = {record['rho_at_half']:,.3g}",
        markup=False,
    )
