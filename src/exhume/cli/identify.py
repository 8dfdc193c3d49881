"""`exhume identify`: whether weights determine the training samples."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from exhume.cli.console import named, new_console, table
from exhume.files import check_new, new_folder, write_json, write_tensors
from exhume.models.opening import Source, open_module
from exhume.theory import identifiability


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
    if out is not None:
        check_new(out)
    opened = open_module(Source(named(model, "identify"), trained, arguments=arguments))
    found, console = identifiability(*opened, rank, tolerance, level), new_console()
    least = found.sufficient_unknowns
    rows = (
        ("degree of the activation", found.degree, "3 or more"),
        ("neurons", found.neurons, ""),
        ("dimensions they span", f"{found.rank_of_neurons} of {found.dim}", ""),
        ("equations", found.equations, found.unknowns),
        ("rank of the equations", found.rank, found.unknowns),
        ("smallest singular value", f"{found.smallest:.1e}", f"{found.tolerance:.1e}"),
        ("rank of the neurons' Gram matrix (sufficient)", found.sufficient_rank, least),
        ("equations left unsolved", f"{found.misfit:.1e}", ""),
    )
    console.print(table(("", "found", "needed"), rows))
    word = "holds" if found.holds else "fails"
    console.print(f"[bold]the rank condition {word}[/], margin {found.margin:.1e} (1 is the edge)")
    for sentence in (*found.reasons, *found.undetermined):
        console.print(sentence, markup=False)
    if found.samples is not None and found.multipliers is not None:
        shown = ", ".join(f"{b:.3g}" for b in found.multipliers.tolist())
        leave = f"they leave {found.residual:.1e} of the weights unexplained"
        console.print(f"{len(found.samples)} active samples, multipliers λy = {shown}; {leave}")
    if out is not None:
        with new_folder(out) as temporary:
            record = asdict(found) | {"holds": found.holds, "margin": found.margin}
            tensors = {word: record.pop(word) for word in ("samples", "multipliers")}
            write_json(temporary / "identifiability.json", record)
            if found.samples is not None:
                write_tensors(temporary / "recovered.safetensors", tensors)
        console.print(f"written: {out}", markup=False)
    if found.samples is None:
        raise SystemExit(1)
