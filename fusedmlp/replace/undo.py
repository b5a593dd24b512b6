"""How a replacement is undone, and what may stand in the way by then."""

from collections.abc import Callable
from typing import Any

from torch import nn

Obstacle = Callable[[], str | None]  # why it cannot be undone now, in words; None if it can
Undo = Callable[[], None]


def class_change(
    name: str, module: nn.Module, before: type, attributes: list[str], method: str = "forward"
) -> tuple[Obstacle, Undo]:
    """Gives a module its class back, and takes the attributes away that came with ours, which replaces `method`."""
    now = type(module)

    def obstacle() -> str | None:
        if type(module) is not now:
            return f"{name or 'the model'} has become a {type(module).__name__} since"
        put_back = getattr(vars(module).get(method), "__func__", None) is getattr(now, method)
        if method in vars(module) and not put_back:
            # It may hold on to the method of our class.
            return f"the {method} of {name or 'the model'} has been replaced on the instance since"
        return None

    def undo() -> None:
        # Our own method, where somebody has wrapped it and taken the wrapper off again.
        vars(module).pop(method, None)
        module.__class__ = before
        for attribute in attributes:
            vars(module).pop(attribute, None)

    return obstacle, undo


def silence(path: str, parent: nn.Module, name: str) -> tuple[Obstacle, Undo]:
    """Puts an identity in the place of an activation, `name` of `parent`, which is done before it."""
    act = getattr(parent, name)
    is_module, is_own = name in parent._modules, name in vars(parent)
    silent = nn.Identity().train(parent.training) if is_module else _identity
    setattr(parent, name, silent)

    def obstacle() -> str | None:
        now = getattr(parent, name, None)
        return None if now is silent else f"{path} has become a {kind(now)} since"

    def undo() -> None:
        if isinstance(act, nn.Module):
            act.train(parent.training)
        if not is_module:
            delattr(parent, name)
        # A method, or a function of the class, is found there again.
        if is_module or is_own:
            setattr(parent, name, act)

    return obstacle, undo


def kind(thing: Any) -> str:
    """What a report calls a module or function."""
    return type(thing).__name__ if isinstance(thing, nn.Module) else getattr(thing, "__name__", type(thing).__name__)


def _identity(x: Any) -> Any:
    return x
