"""sweep.json: the jobs of a sweep, where each one is and what came of it, so that a sweep can be gone on with."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fusedmlp.errors import UserError

FILE = "sweep.json"
WAITING, RUNNING, COMPLETED = "waiting", "running", "completed"


@dataclass
class Job:
    """One job. `folder` is its directory's name in the sweep's, None until it starts; `repeat` counts from 0."""

    index: int
    overrides: list[str]
    repeat: int = 0
    folder: str | None = None
    status: str = WAITING
    reason: str | None = None
    seconds: float | None = None
    # What is known of it before it has written anything, and section `logger` of its config; not kept.
    start: dict[str, Any] = field(default_factory=dict, repr=False)
    logger: Any = None

    @property
    def done(self) -> bool:
        return self.status == COMPLETED

    @property
    def ended(self) -> bool:
        return self.status not in (WAITING, RUNNING)

    def row(self) -> dict[str, Any]:
        """What sweep.json keeps of it."""
        return {name: value for name, value in asdict(self).items() if name not in ("start", "logger")}

    def _is(self, overrides: Sequence[str], repeat: int) -> bool:
        return sorted(self.overrides) == sorted(overrides) and self.repeat == repeat


class Ledger:
    """The jobs of the sweep in `folder`."""

    def __init__(self, folder: Path, command: str, jobs: list[Job] | None = None):
        self.folder, self.command = folder, command
        self.jobs = jobs or []

    @classmethod
    def new(cls, folder: Path, command: str) -> "Ledger":
        """Raises: UserError if `folder` holds a sweep already, whose record would be lost."""
        if (folder / FILE).exists():
            raise UserError(f"{folder} holds a sweep already; go on with it with sweep.resume={folder}")
        return cls(folder, command)

    @classmethod
    def read(cls, folder: Path) -> "Ledger":
        """Raises: UserError if `folder` holds no sweep."""
        try:
            content = json.loads((folder / FILE).read_text())
            jobs = [Job(**job) for job in content["jobs"]]
            if not jobs:
                raise ValueError("it lists no job")
            for job in jobs:
                types = {"overrides": list, "folder": str | None, "status": str, "repeat": int, "index": int}
                if not all(isinstance(getattr(job, name), kind) for name, kind in types.items()):
                    raise ValueError(f"job {job.index} is not as train.py writes it")
            return cls(folder, str(content["command"]), jobs)
        except OSError as error:
            raise UserError(f"{folder} holds no sweep: {FILE} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / FILE} is damaged: {error}") from error

    def write(self) -> None:
        content = {"command": self.command, "jobs": [job.row() for job in self.jobs]}
        partial = self.folder / f"{FILE}.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, self.folder / FILE)

    def plan(self, overrides: Sequence[Sequence[str]], repeats: int) -> list[Job]:
        """The jobs of a command, all of them once, then all again; those that are known keep their row."""
        known, planned = list(self.jobs), []
        for repeat in range(repeats):
            for words in overrides:
                job = next((job for job in known if job._is(words, repeat)), None)
                if job is None:
                    job = Job(len(self.jobs), list(words), repeat)
                    self.jobs.append(job)
                else:
                    known.remove(job)
                planned.append(job)
        return planned

    def plan_again(self, repeats: int) -> list[Job]:
        """The jobs that it has; if they are to be repeated more often than they were, the further repeats too."""
        already = max((job.repeat for job in self.jobs), default=0) + 1
        return self.plan([job.overrides for job in self.jobs if job.repeat == 0], max(repeats, already))

    def claim(self, job: Job, wanted: str) -> Path:
        """Makes a directory for a job that starts: `wanted`, or `wanted`-2 and so on after earlier attempts."""
        number = 1
        while True:
            job.folder = wanted if number == 1 else f"{wanted}-{number}"
            try:
                (self.folder / job.folder).mkdir(parents=True)
                return self.folder / job.folder
            except FileExistsError:
                number += 1


def labels(jobs: Sequence[Job]) -> dict[int, str]:
    """Job index -> what tells it apart from the others: the overrides that differ, without `impl=`.

    If none differ, because there is one job or repeats of one, impl and dim are named.
    """
    common = set.intersection(*(set(job.overrides) for job in jobs))
    if all(set(job.overrides) == common for job in jobs):
        common = {word for word in common if not word.startswith(("impl=", "dim="))}
    repeated = any(job.repeat for job in jobs)
    words = {}
    for job in jobs:
        own = [word.removeprefix("impl=") for word in job.overrides if word not in common]
        words[job.index] = " ".join([*own, *([f"repeat={job.repeat + 1}"] if repeated else [])])
    return words
