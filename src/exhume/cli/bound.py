"""`exhume bound`: what theory says of a width, or of a checkpoint, before any attack."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from exhume.cli.console import new_console, refuse, table
from exhume.errors import InputError
from exhume.features.random import RandomFeatures
from exhume.files import check_new, write_json
from exhume.models.card import DataCard
from exhume.models.opening import Source, open_model, open_network
from exhume.theory.overview import Sizes, overview


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

    It is told sizes, `exhume bound --dim 3072 --samples 100 --width 3072000`, or a checkpoint, a
    model folder or your own: how many samples each block of parameters could give up, and what
    width would be safe.

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
    if model is None:
        own = {"trained": trained, "arguments": arguments, "input_shape": input_shape, "head": head}
        refuse(own, "is for a model; name it with --model, or leave this out")
        if dim is None or samples is None:
            or_a_model = "or name a folder, or --model package.module:factory with --trained."
            raise InputError(f"dim and samples: are needed, --dim 3072 --samples 100; {or_a_model}")
        count = 1 if outputs is None else outputs
        sizes = Sizes(dim, count, width, activation or "relu", samples, subspace)
    else:
        given = {"dim": dim, "width": width, "outputs": outputs}
        refuse(given, "a model has its own; leave it out")
        shape = (input_shape,) if isinstance(input_shape, int) else input_shape
        card = None if shape is None else DataCard.of({}, shape=tuple(shape))
        source = Source(model, trained, card=card, arguments=arguments, head=head)
        sizes = _model_sizes(source, activation, samples, subspace)
    conditions = {"tolerance": tolerance, "separation": separation, "floor": floor}
    conditions |= {"ceiling": ceiling, "failure": failure}
    found, console = overview(sizes, conditions, rho, epsilon, delta), new_console()
    _show(console, found)
    if out is not None:
        write_json(out, found)
        console.print(f"written: {out}", markup=False)


def _model_sizes(
    source: Source, activation: str | None, samples: int | None, subspace: int | None
) -> Sizes:
    """The sizes of a network, or of a folder of random features."""
    if (opened := open_network(source)) is not None:
        net, known = opened
        shapes = {name: tuple(w.shape) for name, w in net.module.named_parameters()}
        if net.head is None:
            refuse({"activation": activation}, "is that of the last layer, and there is none")
        width = None if net.head is None else shapes[net.head_weight][1]
        name = activation or known
        return Sizes(net.dim, net.outputs, width, name, samples, subspace, shapes, net.head)
    problem = open_model(source).problem
    features, m = problem.features, problem.target.shape[1]
    name = features.activation.name if isinstance(features, RandomFeatures) else None
    if activation not in (None, name):
        raise InputError(f"activation: that of {source.model} is {name}; leave it out.")
    shapes = {"last layer": (features.width, m)}
    return Sizes(features.dim, m, features.width, name, samples, subspace, shapes)


def _show(console: Console, found: dict[str, Any]) -> None:
    """Print all that was found, table by table."""
    if (counting := found.get("counting")) is not None:
        ratios = {name: f"{ratio:.3g}" for name, ratio in counting.get("ratios", {}).items()}
        thresholds = counting["thresholds"].items()
        rows = [[name, f"{least:,}", ratios.get(name, "–")] for name, least in thresholds]
        console.print(table(("counting", "least width", "this width ÷ it"), rows))
        if "verdict" in counting:
            console.print(counting["verdict"], markup=False)
    if "blocks" in found:
        heads = ["block", "shape", "parameters", "share", "samples at most", "span known"]
        rows = []
        for block in found["blocks"]:
            sizes = [f"{block[word]:,}" for word in ("parameters", "samples", "spanned")]
            shape = " × ".join(map(str, block["shape"] or ()))
            sizes.insert(1, f"{block['share']:.1%}")
            rows.append([escape(block["name"]), shape, *sizes])
        console.print(table(heads, rows))
        heads = ["samples", "safe width of the last layer", "span known"]
        rows = [[f"{count:,}" for count in row.values()] for row in found["safe_widths"]]
        console.print(table(heads, rows))
    if "guarantee" in found:
        _show_guarantee(console, found["guarantee"], found["sizes"])
    if (series := found.get("hermite")) is not None:
        error, energy, sign = series["error"], series["energy"] or 1.0, series["sign"]
        heads = ["order", f"Hermite coefficient of {found['sizes']['activation']}"]
        rows = [
            [str(k), f"{h:.6f}" if abs(h) > error else "0", f"{h * h / energy:.2%}"]
            for k, h in enumerate(series["coefficients"])
        ]
        rows.append(["above", "", f"{series['share_above']:.2%}"])
        console.print(table([*heads, "share of the energy"], rows))
        console.print(f"the sign of a sample is {sign['verdict']}: {sign['reason']}", markup=False)
    if (private := found.get("privacy")) is not None:
        sphere = private["error_sphere"]
        given = "" if private["told"] else ", if ε and δ come from that ρ,"
        on_sphere = "" if sphere is None else f" ({sphere:.3g} on a sphere)"
        console.print(
            f"privacy: at ρ = {private['rho']:.3g}{given} no attack has a mean relative error "
            f"E‖x − x̂‖²/E‖x‖² below {private['error_gaussian']:.3g}{on_sphere} in "
            f"{private['dim']:,} dimensions; an error of 0.5 is out of reach below ρ = "
            f"{private['rho_at_half']:,.3g}"
        )
    console.print("assumptions:", *found["assumptions"], sep="\n- ", markup=False)


def _show_guarantee(console: Console, record: dict[str, Any], sizes: dict[str, Any]) -> None:
    if "none" in record:
        console.print(f"no guarantee: {record['none']}", markup=False)
        return
    unknowns = sizes["samples"] * (sizes["subspace"] or sizes["dim"])
    widths = {
        "by Hoeffding's inequality, as in the paper": record["hoeffding"],
        "by one equation that is violated": record["certified"],
        "the same, its constant found by a search: no certificate": record["numerical"],
    }
    rows = [[name, f"{p:,.3g}", f"{p / unknowns:,.3g}"] for name, p in widths.items()]
    heads = ("guarantee", "width from which it holds", "÷ (samples × dimension)")
    console.print(table(heads, rows))
    console.print(
        f"with probability {1 - record['failure']:g}; kernel gap {record['gap']:.2e}, log of the "
        f"covering {record['log_covering']:,.0f}"
    )
    if sizes["width"] is not None:
        console.print(
            f"at width {sizes['width']:,} it may fail with probability "
            f"{record['failure_at_width']:.2g}, by the numerical constant "
            f"{record['failure_at_width_numerical']:.2g}"
        )
