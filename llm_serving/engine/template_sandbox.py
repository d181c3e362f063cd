"""A Jinja environment for untrusted templates. Every operation is charged to a budget of steps and characters.

Jinja's sandbox keeps a template away from the process. It does not limit time or memory. This environment changes the
compiled template so that each loop, call, filter, operator and output is charged before or while it runs. Operations
that can make a long result from short operands are checked before they run. Filters and methods whose cost cannot be
stated are not available. So a rendering ends after a number of steps that does not depend on the machine.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sized
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

MAX_BITS = 256
"""Maximum size of an integer that a template may compute with."""
MAX_DEPTH = 64
"""Maximum nesting of a value that a template compares or writes."""
MAX_WIDTH = 10_000
"""Maximum of widths, numbers of columns and similar arguments."""
CHARS_PER_STEP = 256
"""Number of characters or bytes whose processing counts as one step."""
ITEM_CHARS = 8
"""Number of characters that an item of a container counts, in addition to its text."""


class BudgetError(Exception):
    """A template has used up its budget, or its next operation would exceed it."""


class TemplateRefusalError(Exception):
    """The template called ``raise_exception``."""


class Budget:
    """Counts the operations and the characters of text that are left to one rendering of a chat template."""

    __slots__ = ("chars", "steps")

    def __init__(self, steps: int, chars: int) -> None:
        self.steps = steps
        self.chars = chars

    def take(self, chars: int = 0, steps: int = 1) -> None:
        """Use ``chars`` characters and ``steps`` steps. Raises BudgetError if fewer are left."""
        self.chars -= chars
        self.steps -= steps + chars // CHARS_PER_STEP
        if self.chars < 0 or self.steps < 0:
            raise BudgetError("it takes too many steps or makes too much text")

    def size(self, value: object) -> int:
        """Return the characters of a value and of everything in it. The search itself uses up steps."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise BudgetError(f"a number of more than {MAX_BITS} bits")
            return MAX_BITS // 3
        total = 0
        level: list[object] = [value]
        for _ in range(MAX_DEPTH):
            inner: list[object] = []
            for one in level:
                total += len(one) if isinstance(one, str) else ITEM_CHARS
                if isinstance(one, dict):
                    inner += one
                    inner += one.values()
                elif isinstance(one, range):
                    total += ITEM_CHARS * len(one)
                elif isinstance(one, jinja2.utils.Namespace):
                    inner += object.__getattribute__(one, "_Namespace__attrs").items()
                elif isinstance(one, Collection) and not isinstance(one, str):
                    inner += one
                self.take(0, 1 if inner else 0)
                if total + len(inner) > self.chars:
                    raise BudgetError("a value has too many parts")
            if not inner:
                return total
            level = inner
        raise BudgetError(f"a value is nested deeper than {MAX_DEPTH} levels")

    def each(self, values: Any) -> Any:
        """Return ``values`` for a loop. A sized value is charged now, an iterator for each of its items."""
        if isinstance(values, Sized):
            self.take(0, 1 + len(values))
            return values
        return self._counted(iter(values))

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.take()
            yield value


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that charges every operation to the budget of the rendering in the current thread."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self._local = threading.local()
        self.filters = {name: self._guarded(cast(Any, self.filters[name]), guard) for name, guard in _FILTERS.items()}
        self.filters["tojson"] = self._guarded(_tojson, _json_size)
        self.filters[_EACH] = lambda values: self.budget.each(values)
        self.filters[_SIZED] = self._sized
        self.filters[_CONCAT] = self._concat
        for name in _COMPARING_TESTS:
            self.tests[name] = self._guarded(cast(Any, self.tests[name]), _all_sizes)
        self.globals = {
            "range": range,
            "dict": dict,
            "namespace": jinja2.utils.Namespace,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    @property
    def budget(self) -> Budget:
        """The budget of the rendering in this thread. Raises AttributeError while a template is compiled."""
        budget: Budget = self._local.budget
        return budget

    def compile_guarded(self, source: str) -> jinja2.Template:
        """Compile a template whose operations are charged. Raises TemplateError."""
        return self.from_string(_Charges(self).visit(self.parse(source)))

    def pieces(self, template: jinja2.Template, budget: Budget, variables: dict[str, Any]) -> Iterator[str]:
        """Yield the output of a template. The caller must not render another template in this thread meanwhile."""
        self._local.budget = budget
        try:
            yield from template.generate(variables)
        finally:
            del self._local.budget

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.take()
        for value in (left, right):
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise BudgetError(f"a number of more than {MAX_BITS} bits")
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            budget.take(_length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            budget.take(_percent_size(budget, left, right))
        elif operator in ("*", "**"):
            budget.take(_product_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in Jinja)
        budget = __self.budget
        budget.take()
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = (budget.each(args[0]), *args[1:])
        elif not isinstance(__obj, jinja2.runtime.Macro):
            method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps ``str.format``
            owner = getattr(method, "__self__", None)
            if isinstance(owner, jinja2.runtime.LoopContext) or __obj is dict:
                budget.take(sum(map(budget.size, args)))
            elif (methods := _methods_of(owner)) is not None:
                guard = methods.get(method.__name__)
                if guard is None:
                    raise BudgetError(f"the method {method.__name__!r} of {type(owner).__name__} is not available")
                args = _materialized(budget, args)
                named = {name: value for name, value in kwargs.items() if not name.startswith("_")}  # without Jinja's
                budget.take(guard(budget, owner, *args, **named))
        return super().call(__context, __obj, *args, **kwargs)

    def _guarded(self, function: Callable[..., Any], guard: Callable[..., int]) -> Callable[..., Any]:
        """Return a filter or test that is charged ``guard(budget, value, *arguments)`` characters before it runs."""
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
        """Charge a value that is about to be written, compared or cut, and return it."""
        budget = self.budget
        budget.take(len(value) if isinstance(value, str) else budget.size(value))
        return value

    def _concat(self, values: list[Any]) -> str:
        budget = self.budget
        budget.take(sum(map(budget.size, values)))
        return "".join(map(str, values))


_EACH, _SIZED, _CONCAT = "charged each", "charged size", "charged concat"
"""Names of the filters that ``_Charges`` inserts. No template can spell them, because they are not words."""

Expression = jinja2.nodes.Expr


class _Charges(jinja2.visitor.NodeTransformer):
    """Inserts the filters that charge loops, outputs, comparisons, slices and concatenations."""

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
        for operand in node.ops:
            if operand.op in ("in", "notin") or not (_is_constant(node.expr) or _is_constant(operand.expr)):
                operand.expr = self._charged(operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = self._charged(node.node)
        return node

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
        """Charge the items of ``values`` in a call ``name(*values)``."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._filter(node.dyn_args, _EACH)
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
    """Return whether an expression is a short literal in the template."""
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
    """Return JSON without HTML escapes, as transformers does. Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > CHARS_PER_STEP or re.search(r"%[^A-Za-z%]*\d", pattern):
        raise BudgetError("a pattern of strftime_now is too long or has a width")
    return datetime.now().strftime(pattern)


def _methods_of(owner: object) -> dict[str, Callable[..., int]] | None:
    """Return the available methods of an object, by name. None if the object does not have a built-in type."""
    return next((methods for kind, methods in _METHODS if isinstance(owner, kind)), None)


def _materialized(budget: Budget, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with iterators as lists, whose size can be checked. Each item is charged."""
    return tuple(list(budget.each(arg)) if isinstance(arg, Iterator) else arg for arg in args)


def _length(value: Sized) -> int:
    return len(value) if isinstance(value, str) else ITEM_CHARS * len(value)


def _width(value: object) -> int:
    """Return a width, which must be a number of at most ``MAX_WIDTH``."""
    if not isinstance(value, int) or abs(value) > MAX_WIDTH:
        raise BudgetError(f"a width or count is not a number of at most {MAX_WIDTH}")
    return abs(value)


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Return the characters of a product or power. Raises BudgetError for a number of more than ``MAX_BITS`` bits."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise BudgetError(f"a number of more than {MAX_BITS} bits")
        return 0
    value, times = (left, right) if isinstance(right, int) else (right, left)
    return _length(value) * max(times, 0) if isinstance(value, Sized) and isinstance(times, int) else 0


def _percent_size(budget: Budget, pattern: str, values: Any) -> int:
    """Return the maximum length of ``pattern % values``. Raises BudgetError for wide fields."""
    if re.search(r"%[^A-Za-z%]*(\d\d\d|\*)", pattern):
        raise BudgetError("a format has a field of more than 99 characters")
    return len(pattern) + pattern.count("%") * (100 + budget.size(values))


def _format_size(budget: Budget, pattern: str, *args: Any, **kwargs: Any) -> int:
    """Return the maximum length of ``pattern.format(...)``. Raises BudgetError for wide or nested fields."""
    if re.search(r"\d\d\d|\{[^{}]*\{", pattern):
        raise BudgetError("a format has a field of more than 99 characters or a nested field")
    values = sum(map(budget.size, args)) + sum(map(budget.size, kwargs.values()))
    return len(pattern) + pattern.count("{") * (100 + values)


def _size(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    return budget.size(value)


def _all_sizes(budget: Budget, *args: Any, **kwargs: Any) -> int:
    return sum(map(budget.size, args)) + sum(map(budget.size, kwargs.values()))


def _several_sizes(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """The charge of operations that make many objects, or that compare the items several times."""
    return 16 * _all_sizes(budget, value, *args, **kwargs)


def _nothing(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    return 0


def _replace_size(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> int:
    text, old, new = (part if isinstance(part, str) else str(part) for part in (value, old, new))
    found = text.count(old) if old else len(text) + 1
    return len(text) + found * max(len(new) - len(old), 0)


def _join_size(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> int:
    """The charge of the filter ``join``: all items, and the separator for each of them."""
    number = len(value) if isinstance(value, Sized) else 0
    return budget.size(value) + number * budget.size(d)


def _str_join_size(budget: Budget, separator: str, values: Any) -> int:
    return _join_size(budget, values, separator)


def _strip_size(budget: Budget, text: Any, chars: Any = None) -> int:
    """The charge of removing characters from the ends. Each character may be compared with each of ``chars``."""
    return budget.size(text) * (1 + (len(chars) if isinstance(chars, str) else 0) // 16)


def _center_size(budget: Budget, text: Any, width: Any = 80, fill: Any = " ") -> int:
    return budget.size(text) + _width(width)


def _expandtabs_size(budget: Budget, text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * _width(tabsize)


def _indent_size(budget: Budget, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    number = text.count("\n") + 1 if isinstance(text, str) else 1
    return budget.size(text) + number * (len(width) if isinstance(width, str) else _width(width))


def _columns_size(budget: Budget, value: Any, number: Any, fill_with: Any = None) -> int:
    return budget.size(value) + ITEM_CHARS * _width(number)


def _json_size(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> int:
    """The charge of ``tojson``: each character may become six, and each item may stand in an indented line."""
    options = [*args, *kwargs.values()]
    spaces = sum(_width(one) if isinstance(one, int) else budget.size(one) for one in options if one is not None)
    if spaces > CHARS_PER_STEP:
        raise BudgetError("an indentation or a separator of tojson is too long")
    size = budget.size(value)
    return 6 * size + (size // ITEM_CHARS + 1) * spaces * (MAX_DEPTH if spaces > 1 else 1)


def _round_size(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> int:
    if not isinstance(precision, int) or abs(precision) > MAX_DEPTH:
        raise BudgetError(f"a precision is not a number of at most {MAX_DEPTH}")
    return budget.size(value)


def _sum_size(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise BudgetError("a sum begins with a number")
    return 4 * budget.size(value)


def _percent_filter_size(budget: Budget, pattern: Any, *args: Any, **kwargs: Any) -> int:
    return _percent_size(budget, str(pattern), [args, kwargs])


_FILTERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("length", "count", "first", "last", "default", "d", "safe", "abs", "attr"), _nothing),
    **dict.fromkeys(
        ("upper", "lower", "capitalize", "title", "string", "list", "reverse", "items", "map", "select", "reject",
         "selectattr", "rejectattr", "truncate", "int", "float"), _size,
    ),
    **dict.fromkeys(
        ("sort", "dictsort", "unique", "min", "max", "groupby", "wordcount", "escape", "e", "forceescape"),
        _several_sizes,
    ),
    "trim": _strip_size, "replace": _replace_size, "join": _join_size, "center": _center_size,
    "indent": _indent_size, "batch": _columns_size, "slice": _columns_size, "round": _round_size, "sum": _sum_size,
    "format": _percent_filter_size,
}  # fmt: skip
"""The available filters, each with its charge in characters. To add a filter, state a charge that is never too low."""

_STR_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
         "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower",
         "partition", "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "startswith", "swapcase",
         "title", "upper"), _size,
    ),
    **dict.fromkeys(("split", "rsplit", "splitlines"), _several_sizes),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip_size),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _center_size),
    "replace": _replace_size, "join": _str_join_size, "expandtabs": _expandtabs_size, "format": _format_size,
}  # fmt: skip
_LIST_METHODS = dict.fromkeys(("index", "count"), _all_sizes)
_METHODS: tuple[tuple[type, dict[str, Callable[..., int]]], ...] = (
    (str, _STR_METHODS),
    (list, {**_LIST_METHODS, "copy": _size}),
    (tuple, _LIST_METHODS),
    (dict, {**dict.fromkeys(("get", "items", "keys", "values"), _nothing), "copy": _size}),
    (int, {}),
    (float, {}),
    (range, {}),
)
"""The available methods of built-in types, each with its charge in characters."""

_COMPARING_TESTS = ("in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan",
                    ">", "ge", ">=", "sameas")  # fmt: skip
