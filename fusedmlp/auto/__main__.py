"""Show, clear, export and import the table of measured choices: python -m fusedmlp.auto show."""

import argparse
import sys
from pathlib import Path

from fusedmlp import auto, streams
from fusedmlp.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusedmlp.auto", description=__doc__.partition(":")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show", help="print the table")
    commands.add_parser("clear", help="delete it; choices are measured again")
    for name, help_text in (("export", "write it to a file"), ("import", "add the choices of an exported file")):
        commands.add_parser(name, help=help_text).add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(_run(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise  # whoever read the output (`| head`) has gone
    except OSError as error:
        print(f"error: {error.filename or auto.path()}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> str:
    if options.command == "show":
        return auto.show()
    if options.command == "clear":
        auto.clear()
        return f"{auto.path()}: cleared"
    if options.command == "export":
        if options.file.is_dir():
            raise UserError(f"{options.file} is a directory; expected the name of a file to write")
        return f"{auto.export_table(options.file)} choices written to {options.file}"
    return f"{auto.import_table(options.file)} choices added to {auto.path()}"


if __name__ == "__main__":
    sys.exit(streams.exit_code(main))
