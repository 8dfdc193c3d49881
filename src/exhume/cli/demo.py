"""`exhume demo`: a model, an audit and a score on faces that come with scikit-image."""

import shutil
from pathlib import Path

from rich.markup import escape

from exhume.cli.audit import audit
from exhume.cli.console import new_console
from exhume.cli.score import score
from exhume.cli.victim import victim
from exhume.errors import InputError
from exhume.files import private_folder, read_json


def demo(out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Ten faces: train a model on them, forget them, and dig them out of the weights again.

    Args:
        out: folder for the model, the run and the picture; a demo that is there is replaced.
        seed: of faces, model and attack.
    """
    from exhume import report as reports

    console = new_console()
    model, run, mark = out / "model", out / "run", out / ".demo"
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not mark.exists())):
        raise InputError(f"{out}: is not empty, and not an earlier demo; choose another --out.")
    private_folder(out)
    mark.touch()
    for folder in (model, run):
        shutil.rmtree(folder, ignore_errors=True)
    console.rule("1. a model is trained on ten faces")
    victim("faces", model, samples=10, ratio=4.0, data_seed=seed, seed=seed)
    console.rule("2. the attack sees the weights, not the faces")
    audit(str(model), run, samples=10, seed=seed)
    console.rule("3. only now the faces are looked at again")
    score(run)
    picture = reports.gallery_png(run, out / "faces.png")
    count = round(read_json(run / "score.json")["score"]["exact"] * 10)
    console.print(f"\n[bold]{count} of 10 faces exact.[/] picture: {escape(str(picture))}")
