"""Modules that are a gated feed-forward, whatever their class and the names of their linears."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from agmm.runtime.epilogues import GATED, Epilogue, GatedActivation

_HALVES = 2
"""The linears without the one behind them, and the parts of a packed result: gate and up."""


class GatedForm(NamedTuple):
    """A module that computes ``down(activation(gate(x)) * up(x))``, and nothing else.

    Attributes:
        gate: the linear's name in the module.
        up: of the other one, which is ``gate`` where one linear computes both, gate first.
        down: of the last one.
        activation: what becomes of gate and up.
    """

    gate: str
    up: str
    down: str
    activation: GatedActivation

    @property
    def is_packed(self) -> bool:
        """Whether one linear computes gate and up, side by side."""
        return self.gate == self.up


class _OfChildren(fx.Tracer):
    """Traces what a module does with the modules in it, and none of these."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of a module calls more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def gated_form(module: torch.nn.Module) -> GatedForm | None:
    """The form of a gated feed-forward; None where the module's class computes anything else.

    What the class's forward computes is read from its trace. So modules with branches on values,
    further arguments, dropout or a norm inside have none.
    """
    linears = [one for one in module.children() if isinstance(one, torch.nn.Linear)]
    if len(linears) not in (_HALVES, _HALVES + 1):
        return None
    try:
        graph = _OfChildren().trace(module)
        return _form_of(module, list(graph.nodes))
    except Exception:  # a forward may do anything with what stands in for its input
        return None


def _form_of(module: torch.nn.Module, nodes: list[fx.Node]) -> GatedForm | None:
    x, last = nodes[0], nodes[-1]
    if x.op != "placeholder" or last.op != "output" or not isinstance(last.args[0], fx.Node):
        return None
    down = last.args[0]
    product: Any = down.args[0] if down.op == "call_module" else None
    if product is None or product.target not in (operator.mul, torch.mul, "mul"):
        return None
    seen = {x, last, down, product}
    for activated, up in (product.args, product.args[::-1]):
        activation = _activation_of(module, activated)
        if activation is None:
            continue
        gate = activated.args[0]
        names = _packed(gate, up, x, seen) or _separate(gate, up, x)
        seen |= {activated, gate, up}
        if names is None or seen != set(nodes):
            return None
        if not all(_is_linear(module, name) for name in (*names, down.target)):
            return None
        return GatedForm(*names, str(down.target), activation)
    return None


def _is_linear(module: torch.nn.Module, name: Any) -> bool:
    return isinstance(module._modules.get(name), torch.nn.Linear)


def _separate(gate: Any, up: Any, x: fx.Node) -> tuple[str, str] | None:
    for node in (gate, up):
        if node.op != "call_module" or node.args != (x,) or node.kwargs:
            return None
    return None if gate.target == up.target else (gate.target, up.target)


def _packed(gate: Any, up: Any, x: fx.Node, seen: set[fx.Node]) -> tuple[str, str] | None:
    """The name of the linear whose halves these are, twice."""
    if gate.target is not operator.getitem or up.target is not operator.getitem:
        return None
    halves, first = gate.args
    if up.args != (halves, 1) or first != 0 or halves.target not in (torch.chunk, "chunk"):
        return None
    both = halves.args[0]
    rest = [*halves.args[1:], *halves.kwargs.values()]
    if rest != [_HALVES, -1] or both.op != "call_module" or both.args != (x,) or both.kwargs:
        return None
    seen |= {halves, both}
    return both.target, both.target


def _activation_of(module: torch.nn.Module, node: Any) -> GatedActivation | None:
    """Which activation a node computes of its first argument, by its values."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    x = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")  # whatever the default is
    function: Any = node.target
    if node.op == "call_module":
        function = module.get_submodule(str(node.target))
        if isinstance(function, torch.nn.Linear) or next(function.parameters(), None) is not None:
            return None
    elif node.op == "call_method":
        function = getattr(torch.Tensor, str(node.target))
    elif node.op != "call_function" or function is operator.getitem:
        return None
    with torch.no_grad():
        found = function(x, *node.args[1:], **node.kwargs)
        for name in GATED:
            (wanted,) = Epilogue(name)([x, torch.ones_like(x)])
            if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=1e-6):
                return name  # type: ignore[return-value]
    return None
