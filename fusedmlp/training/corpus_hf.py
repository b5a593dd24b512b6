"""Any Hugging Face dataset as a corpus: one text column of one split, rows joined by newlines."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fusedmlp.errors import UserError
from fusedmlp.training.paths import from_user_directory

_ROWS = 1000
# Without files, these would read whatever lies in the current directory.
_FORMATS = ("json", "csv", "parquet", "text", "arrow", "xml")


@dataclass(frozen=True)
class HfSource:
    """A dataset of the Hugging Face hub, a local folder, or a file format with `data_files`.

    `name` is what `datasets.load_dataset` takes as its path: a name on the hub, a folder, or one of json, csv,
    parquet, text. Code that a dataset brings along is never run.

    Raises: UserError that lists what is there for an unknown name, configuration, split or column.
    """

    name: str | None = None
    config: str | None = None
    split: str = "train"
    column: str | None = None
    data_files: str | Sequence[str] | None = None
    kind: ClassVar[str] = "hf"

    def identity(self) -> dict[str, Any]:
        with _one_message(self._asked_for()):
            builder = self._builder()
        # config_id and hash change with the dataset's revision on the hub and with the modification of local files.
        version = [builder.dataset_name, builder.config_id, str(builder.config.version), builder.hash]
        return {"kind": self.kind, "version": version, "split": self.split, "column": self.column}

    def chunks(self) -> Iterator[bytes]:
        with _one_message(self._asked_for()):
            builder = self._builder()
            builder.download_and_prepare()
            dataset = builder.as_dataset(split=self.split)
            column = self._text_column(dataset.features)
            for rows in dataset.select_columns([column]).iter(batch_size=_ROWS):
                yield "".join(f"{row}\n" for row in rows[column] if row is not None).encode()

    def describe(self) -> str:
        return f"{self._asked_for()} has no text"

    def _builder(self):
        import datasets

        if not self.name:
            raise UserError("data=hf needs data.name: a dataset on the Hugging Face hub, a folder, or json, csv, text")
        if not self.split:
            raise UserError("data=hf needs data.split, such as train, train[:10%] or train+validation")
        given: Any = self.data_files
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        files = list(given) if listed else [] if given is None else [given]
        if not all(isinstance(file, str) for file in files):
            raise UserError(f"data.data_files={self.data_files}: expected a file, a glob, or a list of them")
        files = [file if "://" in file else str(from_user_directory(file)) for file in files]
        if self.name in _FORMATS and not files:
            raise UserError(f"data.name={self.name} needs data.data_files: a file, a glob, or a list of them")
        folder = from_user_directory(str(self.name))
        place = str(folder) if self.name not in _FORMATS and folder.is_dir() else str(self.name)
        return datasets.load_dataset_builder(place, self.config, data_files=files or None)

    def _text_column(self, features: Any) -> str:
        """The column asked for, or the only one that holds text."""
        kinds = {name: getattr(feature, "dtype", type(feature).__name__) for name, feature in features.items()}
        text = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
        if self.column is None and len(text) == 1:
            return text[0]
        if self.column is not None and self.column in text:
            return self.column
        there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        asked = (
            f"data.column={self.column} is no text column of" if self.column else "data.column must name a column of"
        )
        raise UserError(f"{asked} {self.name}; its columns are {there}")

    def _asked_for(self) -> str:
        keys = {"name": self.name, "config": self.config, "split": self.split, "data_files": self.data_files}
        return " ".join(f"data.{key}={value}" for key, value in keys.items() if value is not None)


@contextlib.contextmanager
def _one_message(asked_for: str) -> Iterator[None]:
    """Turn whatever the library raises into one UserError, and keep its progress bars for terminals.

    Its failures come from the network, the hub, the file formats and the cache, with no common base class.
    """
    import datasets

    counts, quiet = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS, datasets.utils.are_progress_bars_disabled()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        hint = "; data=stdlib and data=text need no network" if isinstance(error, ConnectionError) else ""
        raise UserError(f"cannot load {asked_for}: {error.__cause__ or error}{hint}") from error
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts
        if not quiet:
            datasets.enable_progress_bars()
