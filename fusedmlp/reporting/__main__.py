"""python -m fusedmlp.reporting DIR... [--out DIR]: the report on any set of runs and sweeps.

Runs of the same configuration on the same machine and commit count as repeats of each other; several machines or
commits are put side by side.
"""

import argparse
import sys
from pathlib import Path

from fusedmlp import streams
from fusedmlp.errors import UserError
from fusedmlp.reporting import report


def main(words: list[str] | None = None) -> int:
    """The exit code: 0, or 1 with one line on stderr."""
    about = (__doc__ or "").partition(":")[2].strip()
    parser = argparse.ArgumentParser("python -m fusedmlp.reporting", description=about)
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="a run, a sweep, or what holds several")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="where to write the report; without it, into the one DIR, or ./report"
    )
    options = parser.parse_args(words)
    out = options.out or (options.folders[0] if len(options.folders) == 1 else Path("report"))
    try:
        written = report.write(options.folders, out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join([written.state, "", *written.verdicts, "", f"report     {out / report.HTML}"]))
    return 0


if __name__ == "__main__":
    sys.exit(streams.exit_code(main))
