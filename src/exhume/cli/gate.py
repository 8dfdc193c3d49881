"""`exhume gate`: whether a model may be released, as an exit code."""

from dataclasses import dataclass
from pathlib import Path

from exhume.auditing import evidence
from exhume.auditing.evidence import Record, cautions
from exhume.auditing.folder import CANDIDATES, SCORE, read_run
from exhume.auditing.judgement import ABOVE
from exhume.auditing.suspects import EXPLAINED
from exhume.checks import number, one_of
from exhume.cli.console import new_console
from exhume.errors import InputError
from exhume.files import digest_of
from exhume.solvers import Outcome
from exhume.theory.support import CUT
from exhume.wording import percent

# Grades of what came back, the strictest first; each counts the samples of those before it, too
GRADES = evidence.GRADES[:-1]


@dataclass(frozen=True)
class Limit:
    """A limit is the largest share of the training samples that may come back with a grade."""

    grade: str
    share: float

    def found(self, scored: Record) -> float:
        """Return the share that came back, by score.json."""
        return number(f"{self.grade} in the score", scored["score"][self.grade], least=0)

    def undecided(self, scored: Record) -> bool:
        """Tell whether what was not measured could be over the limit, where the rest is within."""
        found, more = self.found(scored), evidence.unmeasured(scored) / scored["score"]["samples"]
        return self.grade == GRADES[-1] and found <= self.share < found + more

    def sentence(self, scored: Record) -> str:
        """Say what came back and what may."""
        found, total = self.found(scored), int(scored["score"]["samples"])
        came = f"{round(found * total)} of {total} training samples came back {self.grade}"
        word = "over" if found > self.share else "within"
        if self.undecided(scored):
            word = f"and {evidence.unmeasured(scored)} more were not measured against"
        return f"{came} ({percent(found)}), {word} the limit of {percent(self.share)}"


def limits(words: str) -> tuple[Limit, ...]:
    """Read limits as people write them, such as `recognisable=0.05,exact=0`.

    Example:
        >>> limits("recovered=0.05")
        (Limit(grade='recovered', share=0.05),)
    """
    found = []
    for word in words.split(","):
        grade, _, share = word.partition("=")
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise InputError(
                f"fail_over: expected a grade and a share, such as recognisable=0.05, got {word!r}."
            )
        found.append(Limit(one_of("fail_over", grade.strip(), GRADES), value))
    return tuple(found)


def over(asked: tuple[Limit, ...], result: Record, scored: Record, anyway: bool) -> bool:
    """Tell whether more came back than some limit allows; what is in result.json and score.json.

    A search that was cut off, or that explains far less than the samples do, and found little has
    shown nothing, which is an error, unless that is to count `anyway`; and images that may be
    recognisable, without a control that tells, are one.
    """
    if any(limit.found(scored) > limit.share for limit in asked):
        return True
    if any(limit.undecided(scored) for limit in asked):
        unknown = "how many samples are recognisable was not measured"
        raise InputError(f"gate: {unknown}. {evidence.NO_CONTROL}")
    if not anyway and result["outcome"] in {end.value for end in CUT}:
        raise InputError(
            f"gate: the search did not end ({result['outcome']}), so that little came back shows "
            "nothing; give the audit a larger limit, or give --anyway."
        )
    floor, left = scored.get("residual_at_truth"), result["residual"]
    failed = floor is not None and left is not None and left > ABOVE * max(floor, EXPLAINED)
    if not anyway and failed and result["outcome"] == Outcome.STALLED.value:
        raise InputError(
            f"gate: the search failed: it left {left:.1e}, and the samples themselves leave "
            f"{floor:.1e}. That little came back shows nothing; try another seed, or give --anyway."
        )
    return False


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
    try:
        held = over(asked, folder.result, folder.scored, anyway)
    except InputError:
        console.print("gate: it cannot be said whether more would come back than did")
        raise
    finally:
        console.print("\n".join(limit.sentence(folder.scored) for limit in asked), markup=False)
    if held:
        console.print("gate: over the limit")
        raise SystemExit(1)
    for caution in cautions(folder.result, folder.scored):
        console.print(f"caution: {caution}", markup=False)
    console.print("gate: within the limit, for this attack; a better one may find more")
