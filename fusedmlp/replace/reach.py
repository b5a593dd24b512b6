"""Where a method reaches past its children, to parts of them, or takes its children otherwise than by name: those
have to stay what they are.

    for layer in self.net:            block = self.block            for layer in self.children():
        x = layer(x)                  x = block.fc1(x)                  x = layer(x)
        features.append(x)

An expression stands for parts of a child: `self.net` for the child itself (0 levels down), `self.net[0]`, `self.net.fc`
and what a loop over `self.net` gives for parts of it (1 level down), and so on; `self` stands for the module, with its
children as parts. Variables stand for what is assigned to them, anywhere in the method.
"""

import ast

from torch import nn

Part = tuple[str, int]  # name of a child, and how many levels below it
SELF: Part = ("", 0)

_CONTAINERS = {"list", "tuple", "iter", "enumerate", "reversed", "zip", "islice", "chain"}
_CHILDREN = {"children", "named_children", "modules", "named_modules", "values", "items"}
# They look at a module and call nothing of it.
_LOOKS = {
    "isinstance", "issubclass", "hasattr", "getattr", "setattr", "delattr", "type", "id", "len", "super", "repr", "str",
    "print", "hash", "callable",
} | _CONTAINERS  # fmt: skip


class Reach:
    """What one method takes.

    Attributes:
        names: what is called by name on parts of children, <part>.<name>(...), and children that are called under
            another name than their own.
        opened: (child, levels): modules of which parts are called or indexed, that many levels below the child; `SELF`
            where the children are taken in a way that cannot be read.
        used: attributes of the module that the method reads, other methods among them.
        handed_to: classes whose functions get the module as an argument; an empty name for functions of no class.
        own_class: whether it looks for the class above that of the module itself, `super(type(self), self)`.
    """

    def __init__(self, tree: ast.FunctionDef, me: str):
        self.me = me
        self.names: set[str] = set()
        self.opened: set[Part] = set()
        self.used = {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and self._is_me(node.value)
        }
        self.handed_to: set[str] = set()
        self.own_class = False
        self._variables: dict[str, set[Part]] = {}
        before = -1
        # A loop's body may use what is assigned further down.
        while before != (before := sum(map(len, self._variables.values()))):
            for node in ast.walk(tree):
                self._assign(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(node)
                self._hand_on(node)
            elif isinstance(node, ast.Subscript):
                self.opened |= self._parts(node.value) - {SELF}

    def _assign(self, node: ast.AST) -> None:
        if isinstance(node, ast.For | ast.comprehension):
            self._stands_for(node.target, _below(self._parts(node.iter)))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._stands_for(target, self._parts(node.value))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._stands_for(node.target, self._parts(node.value))

    def _stands_for(self, target: ast.expr, parts: set[Part]) -> None:
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for name in names:
            if isinstance(name, ast.Tuple | ast.List):
                self._stands_for(name, parts)
            elif isinstance(name, ast.Name):
                # Beyond a few levels a variable is assigned from itself, `block = block.next`.
                self._variables.setdefault(name.id, set()).update(part for part in parts if part[1] < 5)

    def _call(self, node: ast.Call) -> None:
        called = [node.func]
        if ast.unparse(node.func).endswith("checkpoint"):
            called += node.args[:1]
        for function in called:
            if isinstance(function, ast.Attribute):
                if self._parts(function.value) and not self._is_me(function.value):
                    self.names.add(function.attr)
            elif isinstance(function, ast.Name | ast.Subscript | ast.Call):
                parts = self._parts(function)
                self.opened |= {(child, down - 1) for child, down in parts if down}
                if not isinstance(function, ast.Name):
                    self.names |= {child for child, down in parts if not down}

    def _hand_on(self, node: ast.Call) -> None:
        """The module itself as an argument: who gets it may do anything with its children. So may some functions."""
        function = ast.unparse(node.func)
        if function == "super" and node.args:
            self.own_class |= ast.unparse(node.args[0]) in (f"type({self.me})", f"{self.me}.__class__")
        if function in ("locals", "eval", "exec"):
            self.opened.add(SELF)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if function not in _LOOKS and any(SELF in self._parts(argument) for argument in given):
            # Base.method(self, ...) is the module's own where Base is.
            self.handed_to.add(function.rpartition(".")[0].rpartition(".")[2])

    def _is_me(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.me

    def _parts(self, node: ast.expr) -> set[Part]:
        if isinstance(node, ast.Name):
            return {SELF} if node.id == self.me else self._variables.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return _named(self._parts(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            parts = self._parts(node.value)
            # A slice is a container of the same parts.
            return parts if isinstance(node.slice, ast.Slice) else _named(parts, _text(node.slice))
        return self._given_back(node) if isinstance(node, ast.Call) else set()

    def _given_back(self, node: ast.Call) -> set[Part]:
        """What a call gives parts of, or parts that it looks up by their names."""
        function = ast.unparse(node.func).rpartition(".")[2]
        if isinstance(node.func, ast.Attribute) and function in _CHILDREN:
            return self._parts(node.func.value)
        if function in _CONTAINERS:
            return {part for argument in node.args for part in self._parts(argument)}
        if function == "vars" and len(node.args) == 1:
            return self._parts(node.args[0])
        if function == "getattr" and len(node.args) > 1:
            return _named(self._parts(node.args[0]), _text(node.args[1]))
        if isinstance(node.func, ast.Attribute) and function == "get_submodule" and len(node.args) == 1:
            return _named(self._parts(node.func.value), _text(node.args[0]))
        return set()


def _below(parts: set[Part]) -> set[Part]:
    return {(child, down + 1) for child, down in parts}


def _named(parts: set[Part], name: str | None) -> set[Part]:
    """The parts of these that have a name; any of them where it is not known."""
    if name in ("_modules", "__dict__"):
        return parts
    mine = {(name, 0)} if name is not None and SELF in parts else _below(parts & {SELF})
    return mine | _below(parts - {SELF})


def _text(node: ast.expr) -> str | None:
    """A name that is written out; the first one of a path."""
    written = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value.partition(".")[0] if written else None  # type: ignore[attr-defined]


def opened_by(cls: type, reaches: list[tuple[str, Reach]]) -> set[Part]:
    """What the methods of a class open: name and reach of each.

    Those that it inherits from above the class that defines `forward` save, load and configure: what they hand on does
    not matter, unless they are called from below.
    """
    above = next((base for base in cls.__mro__ if "forward" in vars(base)), cls).__mro__[1:]
    new = {name for base in cls.__mro__ if base not in above for name in vars(base)}
    called: set[str] = set()
    while new:
        called |= new
        new = {used for name, reach in reaches if name in new for used in reach.used} - called
    own = {base.__name__ for base in cls.__mro__}
    parts = {part for name, reach in reaches for part in reach.opened if part != SELF or name in called}
    return parts | {SELF for name, reach in reaches if name in called and reach.handed_to - own}


def opened_in(module: nn.Module, opened: set[Part]) -> list[nn.Module]:
    """The modules that these are in a module."""
    found = []
    for name, down in opened:
        level = [child for child in [getattr(module, name, None) if name else module] if isinstance(child, nn.Module)]
        for _ in range(down):
            level = [part for one in level for part in one.children()]
        found += level
    return found
