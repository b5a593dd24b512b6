"""Where a method reaches past its children, to parts of them: those have to stay what they are.

    for layer in self.net:            block = self.block
        x = layer(x)                  x = block.fc1(x)
        features.append(x)

An expression stands for parts of a child: `self.net` for the child itself (0 levels down), `self.net[0]`, `self.net.fc`
and what a loop over `self.net` gives for parts of it (1 level down), and so on. Variables stand for what is assigned to
them, anywhere in the method.
"""

import ast

from torch import nn

Part = tuple[str, int]  # name of a child, and how many levels below it

_CONTAINERS = {"list", "tuple", "iter", "enumerate", "reversed", "zip", "islice", "chain"}
_CHILDREN = {"children", "named_children", "values", "items"}


class Reach:
    """What one method takes.

    Attributes:
        names: what is called by name on parts of children, <part>.<name>(...).
        opened: (child, levels): modules of which parts are called or indexed, that many levels below the child.
    """

    def __init__(self, tree: ast.FunctionDef, me: str):
        self.me = me
        self.names: set[str] = set()
        self.opened: set[Part] = set()
        self._variables: dict[str, set[Part]] = {}
        before = -1
        # A loop's body may use what is assigned further down.
        while before != (before := sum(map(len, self._variables.values()))):
            for node in ast.walk(tree):
                self._assign(node)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Subscript):
                self.opened |= self._parts(node.value)

    def _assign(self, node: ast.AST) -> None:
        if isinstance(node, ast.For | ast.comprehension):
            self._stands_for(node.target, {(child, down + 1) for child, down in self._parts(node.iter)})
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
            if isinstance(function, ast.Attribute) and self._parts(function.value):
                self.names.add(function.attr)
            elif isinstance(function, ast.Name):
                self.opened |= {(child, down - 1) for child, down in self._parts(function) if down}

    def _parts(self, node: ast.expr) -> set[Part]:
        if isinstance(node, ast.Name):
            return self._variables.get(node.id, set())
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == self.me:
                return {(node.attr, 0)}
            return {(child, down + 1) for child, down in self._parts(node.value)}
        if isinstance(node, ast.Subscript):
            parts = self._parts(node.value)
            # A slice is a container of the same parts.
            return parts if isinstance(node.slice, ast.Slice) else {(child, down + 1) for child, down in parts}
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _CHILDREN:
                return self._parts(node.func.value)
            if ast.unparse(node.func).rpartition(".")[2] in _CONTAINERS:
                return {part for argument in node.args for part in self._parts(argument)}
        return set()


def opened_in(module: nn.Module, opened: set[Part]) -> list[nn.Module]:
    """The modules that these are in a module."""
    found = []
    for name, down in opened:
        level = [child for child in [getattr(module, name, None)] if isinstance(child, nn.Module)]
        for _ in range(down):
            level = [part for one in level for part in one.children()]
        found += level
    return found
