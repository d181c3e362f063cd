"""A Jinja environment for untrusted templates. Every operation is charged to a budget of steps and characters.

Jinja's sandbox prevents a template from reaching the server's files and objects. It does not limit time or memory. This
environment changes the compiled template so that each loop, call, filter, operator and output is charged to the budget
before or while it runs. Operations that can make a long result from short operands are checked before they run. Filters
and methods without a known maximum cost are not available. So a rendering ends after a number of steps that does not
depend on the machine.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sized
from datetime import date, datetime, time
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from llm_serving.engine.template_budget import CHARS_PER_STEP, MAX_BITS, Budget, BudgetError
from llm_serving.engine.template_charges import (
    COMPARING_TESTS,
    FILTERS,
    OBJECT_CHARS,
    all_sizes,
    json_size,
    length,
    methods_of,
    percent_size,
    product_size,
)


class TemplateRefusalError(Exception):
    """The template called ``raise_exception``."""


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that charges every operation to the budget of the rendering in the current thread."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self._local = threading.local()
        self.filters = {name: self._guarded(cast(Any, self.filters[name]), guard) for name, guard in FILTERS.items()}
        self.filters["tojson"] = self._guarded(_tojson, json_size)
        self.filters[_EACH] = lambda values: self.budget.each(values)
        self.filters[_SIZED] = self._sized
        self.filters[_CONCAT] = self._concat
        self.filters[_MADE] = self._made
        for name in COMPARING_TESTS:
            self.tests[name] = self._guarded(cast(Any, self.tests[name]), all_sizes)
        self.globals = {
            "range": range,
            "dict": dict,
            "namespace": jinja2.utils.Namespace,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: _strftime(pattern, self._local.day),
        }

    @property
    def budget(self) -> Budget:
        """The budget of the rendering that runs in this thread.

        Raises AttributeError if no template is being rendered.
        """
        budget: Budget = self._local.budget
        return budget

    def compile_guarded(self, source: str) -> jinja2.Template:
        """Compiles a template, and inserts the charges for its operations.

        Raises jinja2's TemplateError for an invalid template.
        """
        return self.from_string(_Charges(self).visit(self.parse(source)))

    def pieces(
        self, template: jinja2.Template, budget: Budget, variables: dict[str, Any], day: date | None = None
    ) -> Iterator[str]:
        """Yields the output of a template. The caller must not render another template in this thread meanwhile.

        The template's function ``strftime_now`` formats the start of ``day``, or the present time if it is None.
        """
        self._local.budget, self._local.day = budget, day
        try:
            yield from template.generate(variables)
        finally:
            del self._local.budget, self._local.day

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.take()
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise BudgetError(f"a number of more than {MAX_BITS} bits")
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.take(length(left) + length(right))
        elif operator == "%" and isinstance(left, str):
            budget.take(percent_size(budget, left, right))
        elif operator in ("*", "**"):
            budget.take(product_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in Jinja)
        budget = __self.budget
        budget.take()
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = (budget.each(args[0]), *args[1:])
        elif not isinstance(__obj, jinja2.runtime.Macro):
            method = getattr(__obj, "__wrapped__", __obj)  # Jinja replaces ``str.format`` by a wrapper
            owner = getattr(method, "__self__", None)
            if isinstance(owner, jinja2.runtime.LoopContext) or __obj is dict or __obj is _raise_exception:
                budget.take(OBJECT_CHARS + sum(map(budget.size, args)))
            elif (methods := methods_of(owner)) is not None:
                guard = methods.get(method.__name__)
                if guard is None:
                    raise BudgetError(f"the method {method.__name__!r} of {type(owner).__name__} is not available")
                args = _materialized(budget, args)
                # Leave out the arguments whose names begin with "_", because Jinja adds them.
                named = {name: value for name, value in kwargs.items() if not name.startswith("_")}
                budget.take(guard(budget, owner, *args, **named))
            else:
                budget.take(OBJECT_CHARS)
        return super().call(__context, __obj, *args, **kwargs)

    def _guarded(self, function: Callable[..., Any], guard: Callable[..., int]) -> Callable[..., Any]:
        """Returns a filter or test that charges the budget before it runs.

        The charge is ``guard(budget, value, *arguments)`` characters.
        """
        passes_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            first = int(passes_context)
            args = (*args[:first], *_materialized(budget, args[first : first + 1]), *args[first + 1 :])
            budget.take(guard(budget, *args[first:], **kwargs))
            result = function(*args, **kwargs)
            return budget.each(result) if isinstance(result, Iterator) else result

        return guarded

    def _sized(self, value: Any) -> Any:
        """Charges the characters of a value that is about to be written, compared or sliced. Returns the value."""
        budget = self.budget
        budget.take(len(value) if isinstance(value, str) else budget.size(value))
        return value

    def _made(self, value: Sized) -> Sized:
        """Charges a new list, tuple or dictionary, and returns it.

        Its items are charged separately, by the code that computes them.
        """
        self.budget.take(OBJECT_CHARS + length(value))
        return value

    def _concat(self, values: list[Any]) -> str:
        budget = self.budget
        budget.take(sum(map(budget.size, values)))
        return "".join(map(str, values))


_EACH, _SIZED, _CONCAT, _MADE = "charged each", "charged size", "charged concat", "charged made"
"""Names of the filters that ``_Charges`` inserts. A template cannot use them, because they contain a space."""

Expression = jinja2.nodes.Expr


class _Charges(jinja2.visitor.NodeTransformer):
    """Changes a parsed template: inserts filters that charge loops, outputs, comparisons, slices and concatenations to
    the budget.
    """

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._filter(node.iter, _EACH)
        return node

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [self._charged_output(one) for one in node.nodes]
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if any(operand.op in ("in", "notin") for operand in node.ops):
            node.expr = self._charged(node.expr)  # because a look-up in a dictionary computes the hash of this value
        for operand in node.ops:
            if operand.op in ("in", "notin") or not (_is_constant(node.expr) or _is_constant(operand.expr)):
                operand.expr = self._charged(operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = self._charged(node.node)
        else:
            node.arg = self._charged(node.arg)
        return node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filter(node, _MADE)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filter(node, _MADE) if node.ctx == "load" else node

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            pair.key = self._charged(pair.key)
        return self._filter(node, _MADE)

    def visit_Call(self, node: jinja2.nodes.Call) -> jinja2.nodes.Node:  # noqa: N802
        return self._with_charged_arguments(node)

    def visit_Filter(self, node: jinja2.nodes.Filter) -> jinja2.nodes.Node:  # noqa: N802
        return self._with_charged_arguments(node)

    def visit_Test(self, node: jinja2.nodes.Test) -> jinja2.nodes.Node:  # noqa: N802
        return self._with_charged_arguments(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def _with_charged_arguments(self, node: Any) -> jinja2.nodes.Node:
        """Charges the items of a call's ``*args`` and ``**kwargs`` to the budget of the template."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._filter(node.dyn_args, _EACH)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = self._filter(node.dyn_kwargs, _EACH)
        changed: jinja2.nodes.Node = node
        return changed

    def _charged_output(self, node: Expression) -> Expression:
        if isinstance(node, jinja2.nodes.TemplateData):
            if len(node.data) < CHARS_PER_STEP:
                return node
            return self._filter(jinja2.nodes.Const(node.data, lineno=node.lineno), _SIZED)
        return self._charged(node)

    def _charged(self, node: Expression) -> Expression:
        return node if _is_constant(node) else self._filter(node, _SIZED)

    def _filter(self, node: Any, name: str) -> Expression:
        made = jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made


def _is_constant(node: Expression) -> bool:
    """Returns whether an expression is a short literal, which is not charged."""
    if isinstance(node, jinja2.nodes.Const):
        return not isinstance(node.value, str) or len(node.value) < CHARS_PER_STEP
    if isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple):
        return len(node.items) < CHARS_PER_STEP and all(map(_is_constant, node.items))
    return False


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks the model's own messages for training. It does not change a prompt."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns ``value`` as JSON without HTML escapes, as in transformers. Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime(pattern: str, day: date | None) -> str:
    if len(pattern) > CHARS_PER_STEP or re.search(r"%[^A-Za-z%]*\d", pattern):
        raise BudgetError("a pattern of strftime_now is too long or has a width")
    return (datetime.now() if day is None else datetime.combine(day, time())).strftime(pattern)


def _materialized(budget: Budget, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments, with each iterator replaced by a list so that its size can be checked.

    Charges one step per item.
    """
    return tuple(list(budget.each(arg)) if isinstance(arg, Iterator) else arg for arg in args)
