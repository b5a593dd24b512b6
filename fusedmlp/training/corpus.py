"""A corpus on disk: one flat file of byte tokens and a JSON sidecar, built once per content and setting.

The sidecar is published last, so a token file without one is not a corpus: a killed build is simply built again, and
two builds of the same corpus replace each other's files with equal ones.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fusedmlp.cache import cache_dir
from fusedmlp.errors import UserError
from fusedmlp.training.corpus_sources import Source

VOCAB_SIZE = 256
_FORMAT = 1  # part of every key: raise it whenever the same settings would give other files
_ABANDONED_SECONDS = 24 * 3600
_TEMPORARY = f".*.bin.{'[0-9a-f]' * 32}.tmp"  # narrow, since the directory may be the user's own
_COUNT_BLOCK = 1 << 24

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A packed corpus: `num_train_tokens` bytes of training text, then `num_val_tokens` of validation text.

    `fingerprint` identifies tokens and split whatever the machine and the paths; `unigram_loss` is in nats per token.
    """

    path: Path
    fingerprint: str
    num_train_tokens: int
    num_val_tokens: int
    unigram_loss: float

    def train_tokens(self) -> np.ndarray:
        """(num_train_tokens,) uint8, read-only and memory-mapped."""
        return self._map()[: self.num_train_tokens]

    def val_tokens(self) -> np.ndarray:
        """(num_val_tokens,) uint8, read-only and memory-mapped."""
        return self._map()[self.num_train_tokens :]

    def _map(self) -> np.ndarray:
        # A plain view: indexing the memmap subclass costs microseconds per batch more.
        return np.asarray(np.memmap(self.path, dtype=np.uint8, mode="r"))


def load_or_build(source: Source, val_fraction: float, directory: Path) -> Corpus:
    """Open the cached corpus of this source and split, building it first where there is none.

    Raises: UserError for an empty corpus, for a cache directory that cannot be written, and what the source raises.
    """
    settings = {"format": _FORMAT, "source": source.identity(), "val_fraction": val_fraction}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
    path = directory / f"{source.kind}-{digest}.bin"
    try:
        return _read(path) or _build(source, val_fraction, path)
    except OSError as error:
        raise UserError(
            f"cannot use the data cache {directory}: {error.strerror or error}. "
            "Choose a directory that can be written with data.cache_dir=DIR or the environment variable FUSEDMLP_CACHE."
        ) from error


def default_cache_dir() -> Path:
    """data/ in the package's cache directory.

    Raises: UserError when that directory cannot be told, because there is no home directory.
    """
    try:
        return cache_dir() / "data"
    except RuntimeError as error:
        raise UserError(
            "no home directory to keep the data cache in; set data.cache_dir=DIR or FUSEDMLP_CACHE"
        ) from error


def unigram_loss(train: np.ndarray, val: np.ndarray) -> float:
    """Cross-entropy of `val` under the byte frequencies of `train`, in nats per token.

    Args:
        train, val: (n,) uint8.  Counts start at one, so that a byte the training text lacks has a finite loss.
    """
    train_counts = _byte_counts(train) + 1
    val_counts = _byte_counts(val)
    log_probs = np.log(train_counts / train_counts.sum())
    return float(-(val_counts * log_probs).sum() / max(1, val_counts.sum()))


def _byte_counts(tokens: np.ndarray) -> np.ndarray:
    # In blocks: bincount widens its input to int64.
    counts = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for first in range(0, len(tokens), _COUNT_BLOCK):
        counts += np.bincount(tokens[first : first + _COUNT_BLOCK], minlength=VOCAB_SIZE)
    return counts


def _read(path: Path) -> Corpus | None:
    try:
        fields = json.loads(path.with_suffix(".json").read_text())
        corpus = Corpus(path=path, **fields)
        complete = path.stat().st_size == corpus.num_train_tokens + corpus.num_val_tokens
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return corpus if complete else None


def _build(source: Source, val_fraction: float, path: Path) -> Corpus:
    log.info("Packing the %s corpus into %s", source.kind, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    needed, free = getattr(source, "num_tokens", 0), shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(f"{source.describe()}: so many bytes do not fit into {path.parent}, where {free:,} are free")
    with _temporary(path) as tokens_file, _temporary(path) as sidecar_file:
        digest = _write_tokens(source, tokens_file)
        num_tokens = tokens_file.stat().st_size
        if num_tokens == 0:
            raise UserError(f"the {source.kind} corpus is empty: {source.describe()}")
        num_val = int(num_tokens * val_fraction)
        tokens = np.asarray(np.memmap(tokens_file, dtype=np.uint8, mode="r"))
        corpus = Corpus(
            path=path,
            fingerprint=f"{digest[:32]}-{num_val}",
            num_train_tokens=num_tokens - num_val,
            num_val_tokens=num_val,
            unigram_loss=unigram_loss(tokens[:-num_val] if num_val else tokens, tokens[num_tokens - num_val :]),
        )
        fields = {key: value for key, value in asdict(corpus).items() if key != "path"}
        with open(sidecar_file, "w") as file:
            json.dump(fields, file, indent=2)
            _sync(file)
        os.replace(tokens_file, path)
        os.replace(sidecar_file, path.with_suffix(".json"))
    return corpus


def _write_tokens(source: Source, path: Path) -> str:
    """Write the source's bytes and return their SHA-256."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for chunk in source.chunks():
            file.write(chunk)
            digest.update(chunk)
        _sync(file)
    return digest.hexdigest()


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A new name beside `path`, on the same file system; what is left of it at the end is removed."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _remove_abandoned(directory: Path) -> None:
    # A killed build cannot clean up after itself. A live one writes all the time, so an old file has no owner.
    for leftover in directory.glob(_TEMPORARY):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                leftover.unlink()
