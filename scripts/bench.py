"""Op by op on this machine: time, bandwidth, share of the limit, memory and error of every implementation.

    python scripts/bench.py                                            # everything; about two minutes on a GPU
    python scripts/bench.py softmax --shape 4096x50257 --dtype bf16    # one op at your size
    python scripts/bench.py mlp linear_gelu --impl native triton --full --peers
    python scripts/bench.py copy matmul --size 4096 16384

Each implementation has to be right first (against float64). Then candidates take turns in random order; what counts is
their ratio inside one run, and the share of the limit: the time of a copy of the same bytes, or of the matrix products
alone. Writes bench.json, bench.md, a CSV for each table and plots, and prints the tables.
"""

import os
import sys

# Before PyTorch is imported: its profiler announces every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

from fusedmlp import streams
from fusedmlp.bench.options import parse
from fusedmlp.bench.run import run
from fusedmlp.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    try:
        return run(parse(arguments, (__doc__ or "").splitlines()[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured before is written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(streams.exit_code(main))
