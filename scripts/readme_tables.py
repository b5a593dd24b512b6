"""Write README's measured tables anew from the records that it names.

    python scripts/readme_tables.py            # README.md
    python scripts/readme_tables.py --check    # exit status 1 if it differs, without writing

A part of the README that is generated stands between <!-- bench TABLE RECORD/bench.json --> and <!-- end bench -->.
"""

import argparse
import sys
from pathlib import Path

from fusedmlp.bench.readme import TABLES, render
from fusedmlp.errors import UserError

README = Path(__file__).resolve().parents[1] / "README.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="readme_tables.py",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"tables: {', '.join(TABLES)}",
    )
    parser.add_argument("readme", nargs="?", type=Path, default=README)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are as the records give them")
    args = parser.parse_args(arguments)
    try:
        if not args.readme.is_file():
            raise UserError(f"{args.readme} is not a file")
        wanted = render(args.readme)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if wanted == args.readme.read_text(encoding="utf-8"):
        return 0
    if args.check:
        print(f"{args.readme} differs from its records; run python scripts/readme_tables.py", file=sys.stderr)
        return 1
    try:
        args.readme.write_text(wanted, encoding="utf-8")
    except OSError as error:
        print(f"error: {args.readme} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{args.readme} rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
