"""What `replace_modules` did and did not do, and how to undo it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replaced:
    """A module or part of one that was replaced.

    Attributes:
        name: of the module, as in `model.named_modules()`.
        what: what was there.  by: the module or op that runs in its place.
    """

    name: str
    what: str
    by: str

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.what} -> {self.by}"


@dataclass(frozen=True)
class Left:
    """What was left as it is, and why."""

    name: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.name or '(the model)'}: {self.what} left alone: {self.why}"


@dataclass
class Replacement:
    """The report of `replace_modules`; iterates over what was replaced, then what was left.

    Attributes:
        replaced, left: what was replaced by what, and what was left and why.
        impl: what was asked for.
        verified: whether outputs and gradients agreed; None if that was not asked for.
        difference: what disagreed, and was undone therefore; or None.
    """

    impl: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    verified: bool | None = None
    difference: str | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _obstacles: list[Callable[[], str | None]] = field(default_factory=list, repr=False)

    def __iter__(self) -> Iterator[Replaced | Left]:
        return iter([*self.replaced, *self.left])

    def __len__(self) -> int:
        return len(self.replaced)

    def __bool__(self) -> bool:
        return bool(self.replaced)

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)}, left alone {len(self.left)} (impl={self.impl})"]
        if self.verified:
            lines.append("outputs and gradients agree on the batch given")
        if self.difference is not None:
            lines.append(f"undone: {self.difference}")
        return "\n".join([*lines, *_grouped([str(entry) for entry in self])])

    def restore(self) -> None:
        """Gives the model its own modules back, with the parameters that they have now. A second call does nothing.

        Raises: RuntimeError, before anything is changed, if a replaced module has been wrapped or changed since.
        """
        found = [reason for obstacle in self._obstacles if (reason := obstacle()) is not None]
        if found:
            raise RuntimeError(f"{found[0]}; undo that before restore()")
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._obstacles.clear()


def _grouped(lines: list[str]) -> list[str]:
    """Lines that differ in their numbers only, as layers do, as one with their count."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"\d+", "*", line.partition(": ")[0]) + ": " + line.partition(": ")[2], []).append(
            line
        )
    return [f"  {one[0] if len(one) == 1 else f'{pattern}  ({len(one)} times)'}" for pattern, one in groups.items()]
