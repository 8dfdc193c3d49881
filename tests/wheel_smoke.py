"""Use an installed wheel as a stranger would: help, a tiny model, an audit, a score, a report."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(environment: Path) -> None:
    command = environment.resolve() / "bin" / "exhume"
    with tempfile.TemporaryDirectory() as folder:

        def exhume(*words: str) -> str:
            done = subprocess.run(
                [command, *words], cwd=folder, check=True, capture_output=True, text=True
            )
            return done.stdout

        assert "audit" in exhume("--help")
        exhume("victim", "digits", "--samples", "3", "--ratio", "6", "--classes", "[0,1]",
               "--out", "model")  # fmt: skip
        exhume("audit", "model", "--samples", "3", "--out", "run")
        print(exhume("score", "run", "--truth", "model/truth.safetensors"))
        score = json.loads((Path(folder) / "run" / "score.json").read_text())["score"]
        page = (Path(folder) / "run" / "report.html").read_text()
        assert score["recovered"] == 1.0, score
        assert "3 of 3" in page
    print("wheel smoke test: 1 passed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
