"""impl="auto": the fastest implementation of each op at the sizes at hand, measured once and kept on disk.

The first call of a kind (op, shape bucket, dtype, GELU, which gradients) on a GPU times what can run there, forward and
backward, in turns, behind a check with the oracle, within about half a second. The winner goes into a table,
`auto-choices.json` in the package's cache directory ($FUSEDMLP_CACHE), which later processes and all ranks
read; processes that meet the same call at once wait for the one that measures. The baseline wins ties. On a machine
without a GPU, and for tensors that are not plain ones, native runs.

Nothing is measured while a CUDA graph is captured, under torch.compile, functorch, a dispatch mode, or in a backward
pass: then a known choice runs, or native, and a warning of the logger `fusedmlp.auto` says so once.

    FUSEDMLP_AUTO=measure                          the default
    FUSEDMLP_AUTO=known                            the table or native, never a measurement; the same choice every time.
                                                   Also under torch.use_deterministic_algorithms(True)
    FUSEDMLP_AUTO=native                           always this one (any implementation's name)
    FUSEDMLP_AUTO_IMPLS=native,triton,cuda,compiled   what is timed; compiled is left out by default, since it compiles
                                                   for tens of seconds, and cuda until it is built

To plan once and ship the table with a job: run a few steps on the machine, `python -m fusedmlp.auto export FILE`, then
`python -m fusedmlp.auto import FILE` where the job runs. Imported choices are not measured again.

    python -m fusedmlp.auto show | clear | export FILE | import FILE
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fusedmlp.auto import table
from fusedmlp.auto.candidates import fastest
from fusedmlp.auto.policy import forget, forget_replayed, used, using
from fusedmlp.auto.table import Choices, Entry

__all__ = [
    "Choices", "Entry", "choices", "clear", "export_table", "forget", "forget_replayed", "import_table", "path",
    "replayed", "show", "used", "using",
]  # fmt: skip

path = table.path


def choices() -> Choices:
    """The table on disk: environment (GPU and versions) -> bucket of calls -> times of the implementations in ms."""
    return table.read()


def show() -> str:
    """The table as text, for people: per bucket the times in ms, the chosen one marked with *."""
    known = table.read()
    if not any(known.values()):
        return f"no choices in {path()}: on a GPU the first call of each kind measures"
    lines = [str(path())]
    for environment, entries in known.items():
        lines += ["", environment]
        for key, entry in sorted(entries.items()):
            winner = fastest(entry.ms)
            times = [f"{'*' if name == winner else ''}{name} {ms:.4g} ms" for name, ms in entry.ms.items()]
            left = [f"{name}: {reason}" for name, reason in entry.left.items()]
            lines.append(f"  {key}   {', '.join(times)}{'   left: ' + '; '.join(left) if left else ''}")
    return "\n".join(lines)


def clear() -> None:
    """Deletes the table; choices are measured again. Raises: OSError where the file cannot be deleted."""
    with table.locked(), suppress(FileNotFoundError):
        path().unlink()
    forget()


def export_table(file: Path | str) -> int:
    """Writes the table to a file, to be imported elsewhere; returns the number of its entries. Raises: OSError."""
    known = table.read()
    table.replace(Path(file), table.dump(known))
    return sum(map(len, known.values()))


def import_table(file: Path | str) -> int:
    """Adds the entries of an exported table, in place of what is known of the same calls; returns their number.

    They count for the GPU and versions that they were measured with, and are not measured again.

    Raises: UserError if the file is no such table; OSError if the table cannot be written.
    """
    imported = {
        environment: {key: replace(entry, pinned=True) for key, entry in entries.items()}
        for environment, entries in table.from_file(Path(file)).items()
    }
    table.update(imported)
    forget()
    return sum(map(len, imported.values()))


@contextmanager
def replayed() -> Iterator[None]:
    """Within this context choices are those for work that a CUDA graph replays: the GPU's time alone decides.

    For the capture itself. Calls one by one of small ops are bound by the host, where the implementation with the
    cheapest call wins, which says little about its kernels. Both are measured when a call is first made, unless another
    process has: a warm-up before the capture compiles, builds and tunes what will run if its last steps are in this
    context, too.
    """
    from fusedmlp.impls import auto

    before, auto.replayed = auto.replayed, True
    try:
        yield
    finally:
        auto.replayed = before
