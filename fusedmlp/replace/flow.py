"""What the source of a module's class says about the way of a value through its children.

Two things are looked for. A method that does nothing but hand one value through children (a chain):

    def forward(self, x): return self.fc2(self.drop(self.act(self.fc1(x))))

and, in methods of any kind, a child that is called once, whose result goes to another child and nowhere else (a pair):

    hidden = self.act(self.fc1(hidden))

Whatever cannot be read from the source with certainty is not reported.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from collections import Counter
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from torch import nn

from fusedmlp.replace.reach import Part, Reach, opened_by

# Attributes of a linear layer that may be read beside calling it.
_HARMLESS = {"weight", "bias", "in_features", "out_features", "nx", "nf"}
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


@dataclass
class Flow:
    """What the methods of a class do with its children, by attribute name.

    Attributes:
        chains: method -> children in the order in which a value goes through them.
        pairs: (first, second): the result of `first` goes into `second` only.
        functions: (first, callee): the result of `first` goes into a function whose name ends in gelu.
        calls: name -> how often self.<name>(...) is written.
        mentions: name -> how often self.<name> is read, other than for an attribute such as weight.
        outside: names that are called on children and parts of them, <something of self>.<name>(...).
        opened: children, or modules some levels below them, of which parts are called by themselves.
        own_class: whether a method asks the module for its class to find the one above, which a subclass breaks.
        unreadable: why there is nothing to read; None if there is.
    """

    chains: dict[str, list[str]] = field(default_factory=dict)
    pairs: list[tuple[str, str]] = field(default_factory=list)
    functions: list[tuple[str, str]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    mentions: Counter[str] = field(default_factory=Counter)
    outside: set[str] = field(default_factory=set)
    opened: set[Part] = field(default_factory=set)
    own_class: bool = False
    unreadable: str | None = None


def of(module: nn.Module) -> Flow:
    """The flow of a module's class; a sequential's comes from its children."""
    if type(module).forward is nn.Sequential.forward:
        names = list(module._modules)
        own = replace(of_class(type(module), nn.Sequential))  # type: ignore[arg-type]
        own.chains, own.pairs = {"forward": names}, list(itertools.pairwise(names))
        return own
    return of_class(type(module))  # type: ignore[arg-type]


@functools.cache
def of_class(cls: type, above: type = nn.Module) -> Flow:
    """What the methods that classes below `above` define do."""
    flow = Flow()
    reaches: list[tuple[str, Reach]] = []
    for name, function in _methods(cls, above):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            flow.unreadable = f"the source of {cls.__name__}.{name} cannot be read"
            continue
        if isinstance(tree, ast.FunctionDef) and _positional(tree):
            # A decorator (torch.no_grad, an autocast) is more than its function, which alone would be replaced.
            _read(flow, name, tree, is_resolved=getattr(cls, name, None) is function)
            reaches.append((name, Reach(tree, _positional(tree)[0].arg)))
    flow.outside = {name for _, reach in reaches for name in reach.names}
    flow.opened = opened_by(cls, reaches)
    flow.own_class = any(reach.own_class for _, reach in reaches)
    return flow


def _methods(cls: type, above: type) -> list[tuple[str, FunctionType]]:
    """All functions that classes below `above` define, overridden ones and properties too; construction aside."""
    return [
        (name, inspect.unwrap(function))
        for base in cls.__mro__
        if base not in above.__mro__ and not base.__module__.startswith("fusedmlp.replace")
        for name, value in vars(base).items()
        if isinstance(function := _behind(value), FunctionType) and not (name.startswith("__") and name != "__call__")
    ]


def _behind(value: Any) -> Any:
    """The function of a property."""
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value


def _read(flow: Flow, name: str, tree: ast.FunctionDef, is_resolved: bool) -> None:
    me = _positional(tree)[0].arg
    _count(flow, tree, me)
    chain = _chain(tree, me)
    if chain is not None and is_resolved:
        flow.chains[name] = chain
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Call) and len(inner.args) == 1 and not inner.keywords:
            _add(flow, _child(_called(inner.args[0]), me), inner.func, me)
    for statements in _blocks(tree):
        for index, statement in enumerate(statements):
            _follow(flow, tree, me, statement, statements[index + 1 :])


def _add(flow: Flow, first: str | None, callee: ast.expr, me: str) -> None:
    """Records that the result of child `first` goes into `callee`."""
    if first is None:
        return
    second = _child(callee, me)
    text = ast.unparse(callee)
    if second is not None:
        flow.pairs.append((first, second))
    elif text.lower().endswith("gelu"):
        flow.functions.append((first, text))


def _follow(flow: Flow, tree: ast.FunctionDef, me: str, statement: ast.stmt, rest: list[ast.stmt]) -> None:
    """A pair over a variable: v = self.first(...), and the next statement that has v calls self.second(v)."""
    variable = _target(statement)
    value = getattr(statement, "value", None)
    first = _child(_called(value), me)
    if variable is None or first is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
        return
    following = next((later for later in rest if _reads(later, variable) or _target(later) == variable), None)
    if following is None or not isinstance(following, _SIMPLE) or _reads(following, variable) != 1:
        return
    # Afterwards the variable has to be gone, or to stand for what was made of it.
    if _target(following) != variable and _is_read_later(tree, variable, following):
        return
    if isinstance(following, ast.AugAssign):
        return
    for inner in ast.walk(following):
        if isinstance(inner, ast.Call) and len(inner.args) == 1 and not inner.keywords:
            argument = inner.args[0]
            if isinstance(argument, ast.Name) and argument.id == variable:
                _add(flow, first, inner.func, me)


def _chain(tree: ast.FunctionDef, me: str) -> list[str] | None:
    """The children that the method hands its one argument through, if it does nothing else."""
    parameters = tree.args
    if len(_positional(tree)) != 2 or parameters.vararg or parameters.kwarg or parameters.kwonlyargs:
        return None
    current, names = _positional(tree)[1].arg, []
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    for statement in body:
        passed = _passed_through(getattr(statement, "value", None), me, current)
        if passed is None:
            return None
        names += passed
        if isinstance(statement, ast.Return):
            return names if statement is body[-1] and names else None
        target = _target(statement)
        if target is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
            return None
        current = target
    return None


def _passed_through(value: ast.expr | None, me: str, variable: str) -> list[str] | None:
    """Children in self.c(self.b(self.a(variable))), innermost first."""
    names: list[str] = []
    while isinstance(value, ast.Call):
        name = _child(value.func, me)
        if name is None or len(value.args) != 1 or value.keywords:
            return None
        names.insert(0, name)
        value = value.args[0]
    return names if isinstance(value, ast.Name) and value.id == variable else None


def _count(flow: Flow, tree: ast.FunctionDef, me: str) -> None:
    harmless = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _child(node.func, me)
            if name is not None:
                flow.calls[name] += 1
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if (name := _child(node, me)) is not None:
                flow.mentions[name] += 1
            elif node.attr in _HARMLESS and (name := _child(node.value, me)) is not None:
                harmless[name] += 1
    flow.mentions.subtract(harmless)


def _positional(tree: ast.FunctionDef) -> list[ast.arg]:
    return [*tree.args.posonlyargs, *tree.args.args]


def _child(node: ast.AST | None, me: str) -> str | None:
    """`name` for the expression self.name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return node.attr
    return None


def _called(node: ast.AST | None) -> ast.expr | None:
    return node.func if isinstance(node, ast.Call) else None


def _target(statement: ast.stmt) -> str | None:
    """The one variable that a statement assigns to."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _reads(node: ast.AST, variable: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == variable and isinstance(n.ctx, ast.Load) for n in ast.walk(node))


def _is_read_later(tree: ast.AST, variable: str, statement: ast.stmt) -> bool:
    """Whether a variable may be read after a statement; in a loop what stands before it comes after it too."""
    if any(isinstance(n, ast.For | ast.While) for n in ast.walk(tree)):
        return _reads(tree, variable) != _reads(statement, variable)
    end = (statement.end_lineno or 0, statement.end_col_offset or 0)
    return any(
        isinstance(n, ast.Name) and n.id == variable and isinstance(n.ctx, ast.Load) and (n.lineno, n.col_offset) >= end
        for n in ast.walk(tree)
    )


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """All lists of statements in a function, nested ones too."""
    return [
        block
        for node in ast.walk(tree)
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, name, None), list) and block and isinstance(block[0], ast.stmt)
    ]
