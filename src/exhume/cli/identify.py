"""`exhume identify`: whether weights determine the training samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exhume.cli.console import console as _console
from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from exhume.theory import Identifiability


def identify(
    model: str | None = None,
    trained: str | None = None,
    arguments: dict[str, Any] | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    level: float = 1.0,
    out: Path | None = None,
) -> None:
    """Say whether a two-layer polynomial network determines its training samples; recover them.

    Ends with exit code 0 if it does, 1 if it does not, and 2 if the theory does not cover it.

    Args:
        model: folder of a model (here the word --model may be left out); or
            package.module:factory or path/file.py:factory. Its code is run.
        trained: weights of a factory's model.
        arguments: of the factory, as JSON.
        rank: dimension of the neurons' span; found if left out.
        tolerance: relative singular value that counts as zero; from the weights if left out.
        level: margin of the active samples, which sets the norm where the weights do not.
        out: new folder for the recovered samples.
    """
    from exhume.files import check_new
    from exhume.theory import identifiability

    if out is not None:
        check_new(out)
    found = identifiability(*_weights_of(model, trained, arguments), rank, tolerance, level)
    console = _console()
    console.print(_identifiability_table(found))
    word = "holds" if found.holds else "fails"
    console.print(f"[bold]the rank condition {word}[/], margin {found.margin:.1e} (1 is the edge)")
    for sentence in (*found.reasons, *found.undetermined):
        console.print(sentence, markup=False)
    if found.samples is not None and found.multipliers is not None:
        shown = ", ".join(f"{b:.3g}" for b in found.multipliers.tolist())
        console.print(
            f"{len(found.samples)} active samples, multipliers λy = {shown}; they leave "
            f"{found.residual:.1e} of the weights unexplained"
        )
    if out is not None:
        _write_identified(out, found)
        console.print(f"written: {out}", markup=False)
    if found.samples is None:
        raise SystemExit(1)


def _weights_of(
    model: str | None, trained: str | None, arguments: dict[str, Any] | None
) -> "tuple[nn.Module, Mapping[str, Tensor] | str]":
    """A model folder's network, or a factory's, with its trained weights."""
    from exhume.models.factory import load_factory
    from exhume.models.folder import read_network

    if model is None:
        raise InputError(
            "model: name a model folder, exhume identify FOLDER, or a factory of your own, --model "
            "package.module:factory, with --trained."
        )
    if trained is not None:
        return load_factory(model, arguments), trained
    if arguments is not None or (":" in model and not Path(model).exists()):
        raise InputError(f"model {model!r}: is a factory; give its weights with --trained.")
    network = read_network(Path(model))
    return network.network.module, network.trained


def _identifiability_table(found: "Identifiability") -> "Table":
    from rich.table import Table

    table = Table("", "found", "needed")
    table.add_row("degree of the activation", str(found.degree), "3 or more")
    table.add_row("neurons", str(found.neurons), "")
    table.add_row("dimensions they span", f"{found.rank_of_neurons} of {found.dim}", "")
    table.add_row("equations", str(found.equations), str(found.unknowns))
    table.add_row("rank of the equations", str(found.rank), str(found.unknowns))
    table.add_row("smallest singular value", f"{found.smallest:.1e}", f"{found.tolerance:.1e}")
    table.add_row(
        "rank of the neurons' Gram matrix (sufficient)",
        str(found.sufficient_rank),
        str(found.sufficient_unknowns),
    )
    table.add_row("equations left unsolved", f"{found.misfit:.1e}", "")
    return table


def _write_identified(out: Path, found: "Identifiability") -> None:
    """The recovered samples, and what was found, in a new private folder."""
    from dataclasses import asdict

    from exhume.files import new_folder, write_json, write_tensors

    tensors = ("samples", "multipliers")
    with new_folder(out) as temporary:
        record = {word: x for word, x in asdict(found).items() if word not in tensors}
        record |= {"holds": found.holds, "margin": found.margin}
        write_json(temporary / "identifiability.json", record)
        if found.samples is not None and found.multipliers is not None:
            kept = {"samples": found.samples, "multipliers": found.multipliers}
            write_tensors(temporary / "recovered.safetensors", kept)
