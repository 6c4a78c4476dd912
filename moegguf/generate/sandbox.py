"""Jinja for templates that nobody has checked: what jinja2's sandbox refuses, and a bound on work, time and size.

A template comes out of a model file, so it may be an attack. jinja2's ImmutableSandboxedEnvironment keeps it away from
Python's internals but lets it compute for ever or fill the memory with one expression. Here every loop turn, call,
filter, operator and comparison pays for what it may cost (characters, elements) before it runs, from a purse that is
sized by the input; the purse looks at the clock as it is emptied. Only the filters, methods and globals that chat
templates use exist. Does not know messages or models.
"""

from __future__ import annotations

from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from moegguf.generate.paid import (
    COMPARING_TESTS,
    COPYING_FILTERS,
    FREE_FILTERS,
    LAZY_FILTERS,
    OPERATORS,
    OWN_FILTERS,
    PAID_FILTERS,
    paid,
    paid_as_it_goes,
    pay_for_string_method,
    weighing,
)
from moegguf.generate.purse import ITEM, LimitError, pay, weigh, weigh_length

MAX_NODES = 10_000  # of the syntax tree: the largest known template has 1,300, and compiling takes 0.1 ms each


class GenerationTag(Extension):
    """`{% generation %}` marks what a model is trained on; for asking it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        parser.stream.skip(1)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meters(NodeTransformer):
    """Puts the paying into the tree where no call, filter or operator does it."""

    def __init__(self) -> None:
        self.n_nodes = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
        self.n_nodes += 1
        if self.n_nodes > MAX_NODES:
            raise LimitError(f"it has more than {MAX_NODES} parts")
        return super().generic_visit(node, *args, **named)

    def _body(self, node: Any) -> Any:
        self.generic_visit(node)
        texts = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
        texts += sum(len(part.data) for part in node.body if isinstance(part, nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_cost(node, texts + 10)).set_lineno(node.lineno))
        if getattr(node, "test", None) is not None:
            node.test = nodes.Or(_cost(node, 10), node.test).set_lineno(node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = _body  # noqa: N815 (jinja2's names)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "%concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if any(operand.op in ("in", "notin") for operand in node.ops) or not any(map(_is_constant, sides)):
            node.expr = _weighed(node.expr)
            for operand in node.ops:
                operand.expr = _weighed(operand.expr)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _weighed(pair.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, "%length")
        return node


def _cost(node: nodes.Node, cost: int) -> nodes.Filter:
    """Pays and is false."""
    price = nodes.Const(cost)
    price.set_lineno(node.lineno)
    return _filter(price, "%pay")


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_constant, node.items))
    )


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else _filter(node, "%weigh")


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    found = nodes.Filter(node, name, [], [], None, None)
    found.set_lineno(node.lineno)
    return found


@pass_context  # which also keeps jinja2 from working constants out, unpaid, when it compiles
def _pay_for_output(context: Context, value: Any) -> Any:
    return weigh(value)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment; shared by all templates and threads. Compile and render inside `with Purse(...)`."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_pay_for_output,
        )
        self.binop_table = dict(OPERATORS)
        kept = {name: self.filters[name] for name in FREE_FILTERS}
        kept |= {name: paid(name, self.filters[name]) for name in PAID_FILTERS}
        kept |= {name: paid_as_it_goes(self.filters[name]) for name in LAZY_FILTERS}
        kept |= {name: paid(name, self.filters[name], weigh_length) for name in COPYING_FILTERS}
        self.filters = kept | OWN_FILTERS
        tests: dict[str, Any] = dict(self.tests)
        self.tests.update({name: weighing(tests[name]) for name in COMPARING_TESTS})
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """What jinja2 allows, and what Kimi-K2's template does with lists: those given to templates are copies."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__!r} object is not allowed")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Meters().visit(super()._parse(source, name, filename))
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, argument if isinstance(argument, str | int) else weigh(argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805 (jinja2's form)
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        pay(ITEM)
        if isinstance(owner, str):
            pay_for_string_method(method.__name__, owner, args, named)
        elif not isinstance(__obj, Macro):
            weigh(args)
            if isinstance(method, BuiltinMethodType) and not isinstance(owner, dict):
                weigh(owner)
        return super().call(__context, __obj, *args, **named)
