"""Reads traces of profile=torch.

python -m fusedmlp.profiling TRACE_OR_RUN                    # what it says
python -m fusedmlp.profiling compare A B                     # which kernels came and went, and what that saved
python -m fusedmlp.profiling picture TRACE_OR_RUN out.png    # the timeline
python -m fusedmlp.profiling cut TRACE_OR_RUN out.json.gz    # a small trace with a few of its steps
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from fusedmlp import streams
from fusedmlp.errors import UserError
from fusedmlp.profiling import compare, cut, picture, report, trace

_COMMANDS = ("show", "compare", "picture", "cut")


def main(words: list[str]) -> int:
    """Exit code 0, or 1 with a message for a trace that cannot be read."""
    # `show` is what is done with a trace when nothing else is asked for.
    if words and words[0] not in (*_COMMANDS, "-h", "--help"):
        if words[1:] and not words[0].startswith("-") and not words[1].startswith("-"):
            print(f"error: {words[0]}: no such command; accepted: {', '.join(_COMMANDS)}", file=sys.stderr)
            return 2
        words = ["show", *words]
    options = _parser().parse_args(words)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusedmlp.profiling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    show = commands.add_parser("show", help="what a trace says")
    show.add_argument("trace", type=Path)
    show.add_argument("--top", type=_count(0), default=report.TOP, help="kernels in the table")
    show.add_argument("--json", action="store_true", help="the numbers as JSON")
    show.add_argument(
        "--step-ms", type=_milliseconds, help="step time without the profiler; of a run's directory it is known"
    )
    show.set_defaults(run=_show)
    both = commands.add_parser("compare", help="two traces side by side")
    both.add_argument("a", type=Path)
    both.add_argument("b", type=Path)
    both.add_argument("--top", type=_count(0), default=12, help="kernels in the table")
    both.set_defaults(run=_compare)
    drawn = commands.add_parser("picture", help="draws the timeline")
    drawn.add_argument("trace", type=Path)
    drawn.add_argument("target", type=Path)
    drawn.add_argument("--steps", type=_count(1), default=2, help="steps shown")
    drawn.add_argument("--title", default="")
    drawn.add_argument("--between", type=float, nargs=2, metavar=("FROM", "TO"), help="ms of the step: only this part")
    drawn.add_argument("--step-ms", type=_milliseconds, help="median step without profiler; default: of the run")
    drawn.set_defaults(run=_picture)
    small = commands.add_parser("cut", help="cuts some steps out of a trace")
    small.add_argument("trace", type=Path)
    small.add_argument("target", type=Path)
    small.add_argument("--steps", type=_count(1), default=2, help="steps kept")
    small.set_defaults(run=_cut)
    return parser


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected an integer of at least {least}")
        return int(text)

    return read


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected milliseconds above 0")
    return value


def _show(options: argparse.Namespace) -> None:
    analysis = report.analyse_file(options.trace, options.step_ms)
    print(
        json.dumps(report.values(analysis), indent=2)
        if options.json
        else "\n".join(report.lines(analysis, options.top))
    )


def _compare(options: argparse.Namespace) -> None:
    a, b = report.analyse_file(options.a), report.analyse_file(options.b)
    print("\n".join(compare.lines(a, b, (str(options.a), str(options.b)), options.top)))


def _picture(options: argparse.Namespace) -> None:
    file = trace.find(options.trace)
    step_ms = options.step_ms or report.step_ms_of_run(file.parent)
    between = tuple(options.between) if options.between else None
    picture.draw(trace.read(file), options.target, options.steps, options.title, step_ms, between)
    print(options.target)


def _cut(options: argparse.Namespace) -> None:
    count = cut.cut(trace.find(options.trace), options.target, options.steps)
    print(f"{options.target}: {count} events, {options.target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    sys.exit(streams.exit_code(lambda: main(sys.argv[1:])))
