"""Finds, by structure, what can be replaced in a model, and replaces it in place."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from fusedmlp import impls
from fusedmlp.replace import adopted, flow, layers, reach, undo
from fusedmlp.replace.adopted import OURS, Span
from fusedmlp.replace.flow import Flow
from fusedmlp.replace.layers import LinearLayer
from fusedmlp.replace.report import Left, Replaced, Replacement
from fusedmlp.replace.undo import kind


class Walk:
    """One pass over a model."""

    def __init__(self, model: nn.Module, report: Replacement):
        self.model, self.report, self.impl = model, report, report.impl
        self.dtypes = impls.dtypes(report.impl)
        self.modules = dict(model.named_modules())
        self.uses = Counter(id(child) for module in self.modules.values() for child in module._modules.values())
        self.flows = {name: self._flow(module) for name, module in self.modules.items()}
        # Modules whose parts a class, of this name, takes by itself.
        self.opened = {
            id(part): type(self.modules[name]).__name__
            for name, found in self.flows.items()
            for part in reach.opened_in(self.modules[name], found.opened)
        }
        self.handled: set[int] = set()  # activations that the report speaks of

    @staticmethod
    def _flow(module: nn.Module) -> Flow:
        known = isinstance(module, nn.Sequential | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if isinstance(module, (*OURS, torch.jit.ScriptModule)):
            return Flow()
        if isinstance(module, torch.fx.GraphModule):
            return Flow(unreadable="a torch.fx.GraphModule runs a graph; replace first, trace then")
        if "forward" in vars(module):
            return Flow(unreadable=f"the forward of this {type(module).__name__} is replaced on the instance")
        if type(module).__module__.startswith("torch.") and not known:
            return Flow()
        return flow.of(module)

    def run(self) -> None:
        for name, module in self.modules.items():
            if type(module) is nn.Softmax:
                self._softmax(name, module)
            for method, chain in list(self.flows[name].chains.items()):
                self._mlp(name, module, method, chain)
        for name, module in self.modules.items():
            if not isinstance(module, OURS):
                self._pairs(name, module)
        self._what_else()

    def _softmax(self, name: str, module: nn.Softmax) -> None:
        if module.dim is None:
            self._leave(name, "Softmax", "it has no dim, which PyTorch then guesses from the shape")
        elif (reason := layers.hooked(module)) is not None and "replaced" in reason:
            self._leave(name, "Softmax", reason)
        else:
            before = adopted.softmax(module, self.impl)
            self._restorable(undo.class_change(name, module, before, ["impl"]))
            self._done(name, "Softmax", "softmax")

    def _mlp(self, name: str, module: nn.Module, method: str, chain: list[str]) -> None:
        """Replaces an MLP that a chain of children makes up, if it is the only one in it."""
        children = [getattr(module, child, None) for child in chain]
        spans = [i for i in range(len(chain) - 1) if self._is_fusable(children[i], children[i + 1])]
        if len(spans) != 1 or not all(map(callable, children)):
            return
        first = spans[0]
        second = first + 2
        while second < len(chain) and layers.passes_on(children[second]):
            second += 1
        if second == len(chain):
            return
        layer1, layer2 = layers.linear(children[first]), layers.linear(children[second])
        if not isinstance(layer1, LinearLayer) or not isinstance(layer2, LinearLayer):
            return
        weights = children[first].weight, children[second].weight  # type: ignore[union-attr]
        if weights[0].dtype != weights[1].dtype or weights[0].device != weights[1].device:
            return
        if not adopted.can_change_class(module) or method in vars(module) or self.flows[name].own_class:
            return
        approximate = layers.gelu(children[first + 1])
        assert approximate is not None
        span = Span(
            tuple(chain), first, second, tuple(map(adopted.mark, children)),
            (layer1.transposed, layer2.transposed), approximate, self.impl,
        )  # fmt: skip
        what = type(module).__name__
        before = adopted.mlp(module, method, span)
        self._restorable(undo.class_change(name, module, before, ["_fused", "_replaced"], method))
        self.handled.add(id(children[first + 1]))
        where = "" if method == "forward" else f".{method}"
        names = f"{chain[first]}, {chain[first + 1]}, {chain[second]}"
        self._done(name, f"{what}{where} ({names})", "FusedMLP")
        self.flows[name] = Flow()

    def _is_fusable(self, layer: Any, act: Any) -> bool:
        return (
            isinstance(layers.linear(layer), LinearLayer)
            and layer.weight.dtype in self.dtypes
            and layers.gelu(act) is not None
        )

    def _pairs(self, name: str, module: nn.Module) -> None:
        """Replaces linear layers whose results go into a GELU and nowhere else."""
        found = self.flows[name]
        by_act: dict[str, list[str]] = {}
        for first, second in found.pairs:
            by_act.setdefault(second, []).append(first)
        for act_name, firsts in by_act.items():
            act = getattr(module, act_name, None)
            approximate = None if isinstance(act, nn.Linear) else layers.gelu(act)
            path = f"{name}.{firsts[0]}" if name else firsts[0]
            what = f"{kind(getattr(module, firsts[0], None))} and {kind(act)}"
            if approximate is None:
                if self._looks_linear(module, firsts) and (layers.is_activation(act) or _named_gelu(act)):
                    self._leave(path, what, self._why_not_gelu(act))
                    self.handled.add(id(act))
                continue
            self.handled.add(id(act))
            reason = self._why_no_pair(name, module, found, act_name, firsts)
            if reason is not None:
                self._leave(path, what, reason)
                continue
            for first in dict.fromkeys(firsts):
                self._linear_gelu(name, module, first, approximate)
            self._silence(name, module, act_name)
        for first, function in found.functions:
            path = f"{name}.{first}" if name else first
            if isinstance(layers.linear(getattr(module, first, None)), LinearLayer):
                why = f"the GELU is a call of {function} in {type(module).__name__}, not a module that can be replaced"
                self._leave(path, f"{kind(getattr(module, first))} and {function}", why)

    @staticmethod
    def _looks_linear(module: nn.Module, names: list[str]) -> bool:
        weights = [getattr(getattr(module, name, None), "weight", None) for name in names]
        return any(isinstance(weight, torch.Tensor) and weight.ndim > 1 for weight in weights)

    @staticmethod
    def _why_not_gelu(act: Any) -> str:
        if isinstance(act, nn.Module) and (reason := layers.hooked(act)) is not None:
            return reason
        return f"{kind(act)} is not GELU"

    def _why_no_pair(self, name: str, module: nn.Module, found: Flow, act: str, firsts: list[str]) -> str | None:
        sequential = type(module).forward is nn.Sequential.forward
        if not sequential:
            if found.calls[act] != len(firsts) or found.mentions[act] != len(firsts):
                return f"{type(module).__name__} uses {act} for something else too"
            for first in firsts:
                if not found.calls[first] == found.mentions[first] == firsts.count(first):
                    return f"the result of {first} goes elsewhere in {type(module).__name__} too"
        for first in firsts:
            layer = getattr(module, first, None)
            if isinstance(why := layers.linear(layer), str):
                return why
            assert isinstance(layer, nn.Module)
            if self.uses[id(layer)] != 1:
                return f"{first} is used in {self.uses[id(layer)]} places"
            if (taken := adopted.own_name(layer)) is not None:
                return f"{kind(layer)} has an attribute {taken} of its own"
            if layer.weight.dtype not in self.dtypes:
                return f"impl={self.impl} does not compute in {layer.weight.dtype}"
            if (user := self._taken_from_outside(name, first, act)) is not None:
                return f"{user} calls parts of {type(module).__name__} by itself"
        return None

    def _taken_from_outside(self, name: str, first: str, act: str) -> str | None:
        """A class that reaches into the module at `name`: by an index, in a loop, or by the name of a child."""
        for other, found in self.flows.items():
            if {first, act} & found.outside:
                return type(self.modules[other]).__name__
        return self.opened.get(id(self.modules[name]))

    def _linear_gelu(self, name: str, module: nn.Module, first: str, approximate: str) -> None:
        layer = getattr(module, first)
        found = layers.linear(layer)
        assert isinstance(found, LinearLayer)
        what = f"{kind(layer)} and GELU"
        known = set(vars(layer))
        before = adopted.linear_gelu(layer, found.transposed, approximate, self.impl)
        path = f"{name}.{first}" if name else first
        self._restorable(undo.class_change(path, layer, before, sorted(set(vars(layer)) - known)))
        self._done(path, what, "FusedLinearGeLU")

    def _silence(self, name: str, module: nn.Module, act_name: str) -> None:
        """Puts an identity in the place of an activation, which is done before it."""
        path = f"{name}.{act_name}" if name else act_name
        self._restorable(undo.silence(path, module, act_name))

    def _what_else(self) -> None:
        """Reports the GELUs of which nothing was said yet, and what runs with another implementation already."""
        for name, module in self.modules.items():
            if isinstance(module, OURS) and module.impl != self.impl:
                self._leave(name, type(module).__name__, f"it runs with impl={module.impl!r} already; set its impl")
            if id(module) in self.handled or not (type(module) is nn.GELU or _named_gelu(module)):
                continue
            if not module._modules and name and not any(True for _ in module.parameters()):
                parent = self.modules[name.rpartition(".")[0]]
                if isinstance(parent, OURS):
                    continue
                unreadable = self.flows[name.rpartition(".")[0]].unreadable
                why = unreadable or f"{type(parent).__name__} does not apply it to the result of a linear layer alone"
                self._leave(name, type(module).__name__, why)

    def _restorable(self, way: tuple[undo.Obstacle, undo.Undo]) -> None:
        obstacle, back = way
        self.report._obstacles.append(obstacle)
        self.report._undo.append(back)

    def _done(self, name: str, what: str, by: str) -> None:
        self.report.replaced.append(Replaced(name, what, f"{by}(impl={self.impl!r})"))

    def _leave(self, name: str, what: str, why: str) -> None:
        self.report.left.append(Left(name, what, why))


def _named_gelu(module: Any) -> bool:
    return "gelu" in kind(module).lower()
