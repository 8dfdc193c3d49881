"""`exhume gate`: whether a model may be released, as an exit code."""

from pathlib import Path

from exhume.auditing.evidence import cautions
from exhume.auditing.folder import CANDIDATES, SCORE, read_run
from exhume.cli.console import new_console
from exhume.errors import InputError
from exhume.evaluate.gate import Limit, limits, over
from exhume.files import digest_of


def gate(run: Path = Path("run"), fail_over: str | None = None, anyway: bool = False) -> None:
    """Hold a model whose audit brought back too much of the training data.

    The exit code is 0 where the run is within every limit, 1 where it is over one, and 2 where
    that cannot be said: the run was not scored, its search was cut off or explains far less than
    the samples do, or images that may be recognisable were compared with no held-out ones.

    Args:
        run: folder of an audit that was scored (here the word --run may be left out).
        fail_over: the largest share of training samples that may come back: a grade (exact,
            recovered, recognisable), = and a share, such as recognisable=0.05; several with commas.
        anyway: let pass a search that was cut off before it ended, or that failed.
    """
    if fail_over is None:
        raise InputError("fail_over: say what may come back, such as --fail-over recognisable=0.05")
    judge(run, limits(fail_over), anyway)


def judge(run: Path, asked: tuple[Limit, ...], anyway: bool = False) -> None:
    """Say how a scored run stands to limits; end with exit code 1 where it is over one."""
    folder, console = read_run(run), new_console()
    if folder.scored is None:
        way = "exhume score RUN --truth FILE"
        raise InputError(f"{run / SCORE}: does not exist; compare the run first: {way}.")
    hashes = {entry["role"]: entry["sha256"] for entry in folder.scored["inputs"]}
    if hashes.get("candidates", own := digest_of(run / CANDIDATES)) != own:
        raise InputError(f"{run / SCORE}: is of other candidates than this run's; score it again.")
    console.print("\n".join(limit.sentence(folder.scored) for limit in asked), markup=False)
    try:
        held = over(asked, folder.result, folder.scored, anyway)
    except InputError:
        console.print("gate: it cannot be said whether more would come back")
        raise
    if held:
        console.print("gate: over the limit")
        raise SystemExit(1)
    for caution in cautions(folder.result, folder.scored):
        console.print(f"caution: {caution}", markup=False)
    console.print("gate: within the limit, for this attack; a better one may find more")
