"""Where a corpus comes from: the standard library, files, a Hugging Face dataset, or random bytes.

A source gives its text as chunks of UTF-8 bytes, and an identity that changes whenever the chunks would.
"""

import codecs
import functools
import glob
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from fusedmlp.errors import UserError
from fusedmlp.training.options import converted
from fusedmlp.training.paths import from_user_directory

_READ_BYTES = 1 << 24
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Source(Protocol):
    """What `load_or_build` needs to know of a source."""

    @property
    def kind(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """JSON values that name the content: equal identities, equal chunks."""

    def chunks(self) -> Iterator[bytes]:
        """The text in order, in pieces of any length."""

    def describe(self) -> str:
        """Where the text comes from, in words for a message."""


def make_source(name: str, options: dict[str, Any]) -> Source:
    """Build the source `name` from its own config keys.

    Raises: UserError for an unknown source or key, listing the known ones, and what the source raises.
    """
    from fusedmlp.training.corpus_hf import HfSource

    kinds: dict[str, Any] = {"stdlib": StdlibSource, "text": TextSource, "hf": HfSource, "synthetic": SyntheticSource}
    if name not in kinds:
        raise UserError(f"data.source={name!r} is unknown; choose one of {', '.join(kinds)}")
    known = [field.name for field in fields(kinds[name])]
    if unknown := sorted(set(options) - set(known)):
        accepted = ", ".join(f"data.{key}" for key in known) or "no keys of its own"
        raise UserError(f"data.{unknown[0]} means nothing to data={name}, which accepts {accepted}")
    # As in the keys that all sources share, 1e6 may stand for 1000000.
    whole = [field.name for field in fields(kinds[name]) if field.type is int and field.name in options]
    return kinds[name](**options | {key: converted(f"data.{key}", options[key], int) for key in whole})


def require_integers(minimum: int, **values: Any) -> None:
    """Raise UserError for the first value that is no integer of at least `minimum`; its name is its key in data."""
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise UserError(f"data.{key}={value!r} is not accepted; it must be an integer of at least {minimum}")


@dataclass(frozen=True)
class StdlibSource:
    """The .py files of the running Python's standard library, without tests and installed packages.

    Files are ordered by a hash of their names, so that the validation tail is a sample of the whole library.
    """

    kind: ClassVar[str] = "stdlib"

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "files": [_file_digest(path) for path in self._files()]}

    def chunks(self) -> Iterator[bytes]:
        return _through_datasets(functools.partial(_documents, self._files()))

    def describe(self) -> str:
        return f"{sysconfig.get_paths()['stdlib']} has no .py files to read; use data=text data.files=..."

    def _files(self) -> tuple[Path, ...]:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = []
        for directory, subdirectories, names in os.walk(root):
            subdirectories[:] = [name for name in subdirectories if name not in _STDLIB_SKIPPED]
            # _sysconfigdata holds the paths of the machine that built Python.
            names = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
            found += [Path(directory, name) for name in names]
        readable = filter(_is_text, found)
        return tuple(
            sorted(readable, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())
        )


@dataclass(frozen=True)
class TextSource:
    """UTF-8 text files, in the order given: a path, a glob (`**` descends), or a list of them.

    Raises: UserError when `files` is missing, or names nothing, a directory, or a file that is not text.
    """

    files: str | Sequence[str] | None = None
    kind: ClassVar[str] = "text"

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "files": [_file_digest(path) for path in self._files()]}

    def chunks(self) -> Iterator[bytes]:
        return _through_datasets(functools.partial(_documents, self._files()))

    def describe(self) -> str:
        return f"data.files={self.files} holds no text"

    def _files(self) -> tuple[Path, ...]:
        listed = isinstance(self.files, Sequence) and not isinstance(self.files, str)
        patterns = list(self.files or []) if listed else [self.files]
        if not patterns or not all(isinstance(pattern, int | float | str) and pattern != "" for pattern in patterns):
            raise UserError(
                "data=text needs data.files: a file, a glob such as 'docs/**/*.md', or a list [a.txt,b.txt]"
            )
        paths = [path for pattern in patterns for path in _matches(str(pattern))]
        return tuple(dict.fromkeys(paths))


@dataclass(frozen=True)
class SyntheticSource:
    """`num_tokens` uniformly random bytes: nothing to learn, for measuring speed."""

    num_tokens: int = 1 << 24
    content_seed: int = 0

    def __post_init__(self) -> None:
        require_integers(1, num_tokens=self.num_tokens)
        require_integers(0, content_seed=self.content_seed)

    kind: ClassVar[str] = "synthetic"

    def identity(self) -> dict[str, Any]:
        return {"kind": self.kind, "num_tokens": self.num_tokens, "content_seed": self.content_seed}

    def chunks(self) -> Iterator[bytes]:
        generator = np.random.default_rng(self.content_seed)
        for first in range(0, self.num_tokens, _READ_BYTES):
            yield generator.bytes(min(_READ_BYTES, self.num_tokens - first))

    def describe(self) -> str:
        return f"data.num_tokens={self.num_tokens}"


def _through_datasets(rows: Callable[[], Iterator[dict[str, str]]]) -> Iterator[bytes]:
    """Stream rows through a Hugging Face dataset: no copy of them in its cache, no progress bar, no network."""
    import datasets

    # Even a streamed dataset makes a lock file in the library's cache, which need not be writable.
    cache = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as scratch:
        datasets.config.HF_DATASETS_CACHE = scratch
        try:
            dataset = datasets.IterableDataset.from_generator(rows)
        finally:
            datasets.config.HF_DATASETS_CACHE = cache
    for row in dataset:
        yield row["text"].encode()


def _documents(paths: tuple[Path, ...]) -> Iterator[dict[str, str]]:
    for position, path in enumerate(paths):
        if position:
            yield {"text": "\n"}
        yield from ({"text": text} for text in _read_text(path))


def _read_text(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                if b"\0" in block:
                    raise UserError(f"{path} is not text: it holds NUL bytes; data.files accepts UTF-8 text files")
                yield decoder.decode(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}); data.files accepts UTF-8 text files") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _matches(pattern: str) -> list[Path]:
    path = from_user_directory(pattern)
    found = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    files = [match for match in found if match.is_file()]
    if files:
        return files
    if path.is_dir():
        raise UserError(
            f"data.files={pattern} is a directory; name the files in it, as in '{pattern.rstrip('/')}/**/*.txt'"
        )
    raise UserError(f"data.files={pattern} matches no file (looked for {path})")


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def _is_text(path: Path) -> bool:
    try:
        return "\0" not in path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return False
