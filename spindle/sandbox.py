"""Jinja's immutable sandbox with a meter: a template gets so much time and memory, and no more.

Jinja keeps a template from files, attributes and changes, but not from `'x' * 10**10` or from three
loops inside one another. Here all that a template does is counted. Work is charged as it is done: a
turn of a loop, a call, an attribute, an object and its parts, a character that is written. What
could make much out of little is looked at before: each of `*`, `**`, `%`, a width, a replacement,
a join. So nothing larger than `ONE` is ever made, and no more than `WORK` altogether, both plus a
multiple of what the template was given.

One call into C cannot be broken off, whatever the clock says. So of the methods of Python's types
those alone may be called that take time in proportion to their texts (`METHODS_OF`); where a
comparison or a search takes more, it is charged, or looked at, before.

The counting is put into the template's syntax tree, which Jinja then compiles as it is.
"""

from __future__ import annotations

import contextvars
import functools
import math
import re
import string
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

ONE = 2**22  # characters, or objects, of one value
ONE_TIMES = 16  # and so many times the size of what was given
WORK = 2**22  # of all values and steps together
WORK_TIMES = 128
TURN = 4  # what a turn of a loop counts, besides the text in it,
LOOK = 1000  # and after how much work the clock is looked at
OBJECT = 16  # what an object counts: bytes divided by four, about
LIMIT_S = 10.0  # for one rendering; a conversation takes milliseconds
BIG = 10**6  # a number beside a text, such as a width
LONG_BITS = 2**16  # an integer's
COMPARED = 64  # characters that are compared at the cost of a step
SCANNED = 2**30  # of a text times those that are looked for in it, where C tries them one by one
SLOW = {"striptags", "urlize", "wordwrap", "pprint"}  # may take the square of a text's length,
SLOW_LENGTH = 10**5  # so that it may not be longer
SOURCE_LENGTH = 2**18  # of a template; those of real models have a tenth

VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
# Filters that hand on what they are given, and never write it as text.
NO_TEXT = set(
    "attr batch count d default dictsort first groupby items last length list map".split()
)
NO_TEXT |= set("max min random reject rejectattr reverse select selectattr slice sort sum".split())
NO_TEXT |= {"float", "int", "unique"}
WIDE = {"batch", "slice"}  # of those, what takes a width
ORDERS = {"dictsort", "groupby", "max", "min", "sort", "unique"}  # and what compares, or makes keys

# What a template may call of Python's types. Not `encode`: some of Python's codecs take the square
# of a text's length. What changes a list or a dictionary is not for Jinja's immutable sandbox.
OF_TEXT = set("capitalize casefold center count endswith expandtabs find format format_map".split())
OF_TEXT |= set("index isalnum isalpha isascii isdecimal isdigit isidentifier islower".split())
OF_TEXT |= set("isnumeric isprintable isspace istitle isupper join ljust lower lstrip".split())
OF_TEXT |= set("partition removeprefix removesuffix replace rfind rindex rjust rpartition".split())
OF_TEXT |= set("rsplit rstrip split splitlines startswith strip swapcase title upper zfill".split())
METHODS_OF: tuple[tuple[Any, set[str]], ...] = (
    (str, OF_TEXT),
    (dict, {"copy", "get", "items", "keys", "values"}),
    (list | tuple | range, {"copy", "count", "index"}),
    (int | float, {"is_integer"}),
)


class TooMuch(SecurityError):
    """The template has had its share."""


class Meter:
    """What one rendering may still do."""

    def __init__(self, given: Any) -> None:
        size = weigh(given, math.inf).chars
        self.one = ONE + ONE_TIMES * size
        self.left = self.look = WORK + WORK_TIMES * size
        self.end_s = time.monotonic() + LIMIT_S

    def spend(self, work: int) -> None:
        """Charge so much work; TooMuch: that was all, or the time is over."""
        self.left -= work
        if self.left <= self.look:  # at the clock, now and then
            self.look = max(self.left - LOOK, -1)
            if self.left < 0:
                raise TooMuch("more steps, or more text, than any conversation takes")
            if time.monotonic() > self.end_s:
                raise TooMuch(f"more than {LIMIT_S:.0f} s")

    def allow(self, size: int) -> None:
        """Before something is made: it must not be larger than one value may be."""
        if size > self.one:
            raise TooMuch(f"a value of {size:.3g} characters, where {self.one} are allowed")

    def made(self, value: Any) -> Any:
        """Charge a new value, and hand it on."""
        if isinstance(value, str | bytes):
            self.spend(OBJECT + len(value))
        elif isinstance(value, list | tuple | set | frozenset | dict | Namespace):
            self.spend(OBJECT * weigh(value, self.left / OBJECT).objects)
        else:
            if isinstance(value, int) and value.bit_length() > LONG_BITS:
                raise TooMuch(f"an integer of more than {LONG_BITS} bits")
            self.spend(1)
        return value

    def compared(self, value: Any) -> Any:
        """Charge what a comparison with a value, or a search in it, may look at; hand it on.

        A text with a text is so fast that it is free.
        """
        if isinstance(value, list | tuple | dict) or isinstance(value, VIEWS):
            self.spend(1 + len(value))
            parts = chain.from_iterable(value.items()) if isinstance(value, dict) else value
            self.spend(sum(map(_chars, parts)) // COMPARED)
        else:
            self.spend(1)
        return value

    def text(self, value: Any) -> int:
        """How many characters a value has when it is written; TooMuch: it may not be."""
        if isinstance(value, str):
            size = len(value)
        else:
            size = weigh(value, self.one, self.one).chars
        self.allow(size)
        return size


METER: contextvars.ContextVar[Meter] = contextvars.ContextVar("METER")


@contextmanager
def metered(given: Any) -> Iterator[None]:
    """Count what a template does from here on; TooMuch is raised inside when it is enough."""
    token = METER.set(Meter(given))
    try:
        yield
    finally:
        METER.reset(token)


class Weight:
    """Objects of a value with all that is in it, characters of its text, and how deep it goes."""

    __slots__ = ("chars", "depth", "objects")

    def __init__(self) -> None:
        self.objects = self.chars = self.depth = 0


def weigh(value: Any, most_objects: float, most_chars: float = math.inf) -> Weight:
    """The weight of a value. TooMuch: more than that.

    A list that is in another one twice counts twice, for it is written twice; one that contains
    itself has no end, and too much weight.
    """
    found, stack = Weight(), list[tuple[Any, int]]([(value, 0)])
    while stack:
        one, depth = stack.pop()
        found.objects += 1
        found.depth = max(found.depth, depth)
        found.chars += len(one) if isinstance(one, str | bytes) else 8
        if found.objects > most_objects or found.chars > most_chars:
            raise TooMuch(f"a value of more than {found.objects - 1} parts, with what is in them")
        if isinstance(one, Namespace):
            one = Namespace.__getattribute__(one, "_Namespace__attrs")
        if isinstance(one, dict):
            stack += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list | tuple | set | frozenset) or isinstance(one, VIEWS):
            stack += [(part, depth + 1) for part in one]
    return found


def _chars(part: Any) -> int:
    """Characters of a part of a value; those of `weigh`, but soon where it is no list."""
    if isinstance(part, str):
        return len(part)
    return 0 if isinstance(part, int) else weigh(part, math.inf).chars


# What is looked at before it is done: the most that it can make.


def numbers_in(values: Any) -> Iterator[int]:
    """Integers among arguments, and in tuples among them."""
    for value in values:
        if isinstance(value, tuple):
            yield from numbers_in(value)
        elif isinstance(value, int):
            yield abs(value)


def _check_numbers(values: Any) -> None:
    if any(number > BIG for number in numbers_in(values)):
        raise TooMuch(f"a number above {BIG} beside a text or a list")


def _check_format(meter: Meter, layout: str, values: Any, fields: int) -> None:
    """A layout of % or str.format, with so many fields: its widths, and what it is filled with."""
    _check_numbers(values if "*" in layout else ())
    widths = [int(digits[:20]) for digits in re.findall(r"\d+", layout)]
    filled = sum(meter.text(value) for value in values)
    meter.allow(len(layout) + sum(widths) + fields * filled)


def _check_braces(meter: Meter, layout: str, values: Any) -> None:
    for _, _, spec, _ in string.Formatter().parse(layout):
        if spec and "{" in spec:
            raise TooMuch("a width that is itself a field, in a format")
    _check_format(meter, layout, values, layout.count("{"))


def _check_replace(meter: Meter, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    meter.text(text)
    text, old, new = str(text), str(old), str(new)
    meter.allow(len(text) + text.count(old) * len(new))


def _check_join(meter: Meter, parts: list[Any], separator: Any = "", *_: Any, **__: Any) -> None:
    meter.allow(meter.text(parts) + len(parts) * len(str(separator)))


def _check_indent(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    meter.text(text)
    by = width if isinstance(width, int) else len(str(width))
    meter.allow((str(text).count("\n") + 1) * by)


def _check_tojson(meter: Meter, value: Any, *args: Any, **options: Any) -> None:
    weight = weigh(value, meter.one, meter.one)
    indent = options.get("indent", args[1] if len(args) > 1 else None) or 0
    by = indent if isinstance(indent, int) else len(str(indent))
    separators = options.get("separators", args[2] if len(args) > 2 else None) or ()
    meter.allow(weight.chars + weight.objects * (by * weight.depth + meter.text(list(separators))))


def _check_sum(meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TooMuch("a sum of what are no numbers")


def _check_expandtabs(meter: Meter, text: str, size: int = 8) -> None:
    meter.allow(len(text) + text.count("\t") * size)


def _check_scan(meter: Meter, text: Any, wanted: Any = None, *_: Any, **named: Any) -> None:
    wanted = next(iter(named.values()), wanted)  # `sep`, or the filter's `chars`
    if isinstance(wanted, str) and len(wanted) * meter.text(text) > SCANNED:
        raise TooMuch(f"a search for {len(wanted)} characters in a long text, from its end")


FILTERS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": _check_join,
    "indent": _check_indent,
    "tojson": _check_tojson,
    "format": lambda meter, layout, *values, **named: _check_format(
        meter, str(layout), (*values, *named.values()), str(layout).count("%")
    ),
    "sum": _check_sum,
    "trim": _check_scan,
}
METHODS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "join": lambda meter, separator, parts: _check_join(meter, parts, separator),
    "expandtabs": _check_expandtabs,
    **dict.fromkeys(("lstrip", "rstrip", "strip"), _check_scan),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _check_scan),
    "format": lambda meter, layout, *values, **named: _check_braces(
        meter, layout, (*values, *named.values())
    ),
    "format_map": lambda meter, layout, mapping: _check_braces(meter, layout, (mapping,)),
}


def _check_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """The operators that make much of little."""
    if operator == "%" and isinstance(left, str):
        _check_format(meter, left, right if isinstance(right, tuple) else (right,), left.count("%"))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits, other = left.bit_length(), right.bit_length()
        if (bits * max(right, 1) if operator == "**" else bits + other) > LONG_BITS:
            raise TooMuch(f"an integer of more than {LONG_BITS} bits")
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and hasattr(many, "__len__"):
                meter.allow(len(many) * times)


# The parts of Jinja that count.


def _counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is looked at before, and charged for what it makes."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0  # where the value is among the arguments

    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        meter = METER.get()
        passed, value, rest = args[:at], args[at], args[at + 1 :]
        if name in ORDERS | {"join"} and not isinstance(value, str | list | tuple | dict):
            value = list(value)
        if name in ORDERS:
            meter.spend(weigh(value, math.inf).chars)
        if name in WIDE or name not in NO_TEXT:
            _check_numbers((*rest, *options.values()))
        if name not in NO_TEXT:
            size = meter.text(value)
            if name in SLOW and size > SLOW_LENGTH:
                raise TooMuch(f"{name} of more than {SLOW_LENGTH} characters")
        if name in FILTERS:
            FILTERS[name](meter, value, *rest, **options)
        return meter.made(function(*passed, value, *rest, **options))

    return counted


def _counted_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        METER.get().spend(1)
        for value in args[1:]:
            METER.get().compared(value)
        return function(*args, **options)

    return counted


# Called from the compiled template. Names that no template can write; the context, which they do
# not need, keeps Jinja from working them out when it compiles.


@pass_context
def _step(context: Context, work: int) -> bool:
    METER.get().spend(work)
    return True


@pass_context
def _made(context: Context, value: Any) -> Any:
    return METER.get().made(value)


@pass_context
def _part(context: Context, value: Any) -> Any:
    """A slice: as many new places, and nothing new in them."""
    METER.get().spend(OBJECT + len(value) if hasattr(value, "__len__") else 1)
    return value


@pass_context
def _compared(context: Context, value: Any) -> Any:
    return METER.get().compared(value)


@pass_context
def _searched(context: Context, value: Any) -> Any:
    """What `in` looks through: all of a list, one key of a dictionary."""
    return value if isinstance(value, dict) else METER.get().compared(value)


@pass_context
def _written(context: Context, value: Any) -> Any:
    meter = METER.get()
    meter.spend(1 + meter.text(value))
    return value


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Jinja's random paragraphs, few of them."""
    if n * max > 10_000:
        raise TooMuch(f"{n} random paragraphs")
    return str(generate_lorem_ipsum(n, html, min, max))


def _range(*bounds: int) -> range:
    """Jinja's, of small numbers: a dictionary takes multiples of 2**61 - 1 for one another."""
    if any(isinstance(bound, int) and bound.bit_length() > 53 for bound in bounds):
        raise TooMuch("a range beyond 2**53")
    return safe_range(*bounds)


HOOKS = {"meter: step": _step, "meter: made": _made, "meter: part": _part}
HOOKS |= {"meter: compared": _compared, "meter: searched": _searched, "meter: text": _written}


class _Counting(NodeTransformer):
    """Puts the counting into a template's syntax tree."""

    def __init__(self, environment: ImmutableSandboxedEnvironment) -> None:
        self.environment = environment

    def hook(self, node: nodes.Expr, name: str) -> nodes.Expr:
        made = nodes.Filter(node, f"meter: {name}", [], [], None, None, lineno=node.lineno)
        made.set_environment(self.environment)
        return made

    def step(self, node: nodes.Node, work: int) -> nodes.Expr:
        return self.hook(nodes.Const(work, lineno=node.lineno), "step")

    def counted_body(self, node: Any) -> nodes.Node:
        """A body that is run again and again: a turn costs something, and so does its text."""
        work = TURN + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        first = nodes.ExprStmt(self.step(node, work), lineno=node.lineno)
        node.body = [first.set_environment(self.environment), *node.body]
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = counted_body

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # what it leaves out are turns, too
            both = nodes.And(self.step(node, TURN), node.test, lineno=node.lineno)
            node.test = both.set_environment(self.environment)
        return self.counted_body(node)

    def literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_target else self.hook(node, "made")

    visit_List = visit_Tuple = visit_Dict = literal

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self.hook(node, "part") if isinstance(node.arg, nodes.Slice) else node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:
        self.generic_visit(node)
        how = "searched" if node.op in ("in", "notin") else "compared"
        node.expr = self.hook(node.expr, how)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self.hook(part, "text") for part in node.nodes]
        return node


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The environment whose templates run inside `metered` and nowhere else."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False, finalize=_written)
        self.filters = {n: _counted_filter(n, f) for n, f in DEFAULT_FILTERS.items()} | HOOKS
        tests: dict[str, Any] = dict(DEFAULT_TESTS)
        self.tests = {name: _counted_test(test) for name, test in tests.items()}
        self.globals |= {"lipsum": _lipsum, "range": _range}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """One more filter, or another of that name, counted as the others are."""
        self.filters[name] = _counted_filter(name, function)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Counting(self).visit(source), *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        _check_operator(meter, operator, left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        METER.get().spend(1)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        METER.get().spend(1)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, *args: Any, **options: Any) -> Any:
        meter = METER.get()
        meter.spend(1 + len(args) + len(options))
        method = getattr(obj, "__wrapped__", obj) if isinstance(obj, types.FunctionType) else obj
        if isinstance(method, types.BuiltinMethodType | types.MethodType):
            args = self.checked(meter, method, args, options)
        return meter.made(super().call(context, obj, *args, **options))

    def checked(
        self, meter: Meter, method: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of a method, once they were looked at. SecurityError: none may call it."""
        name, owner = method.__name__, method.__self__
        own = ("_loop_vars", "_block_vars")  # Jinja's, which it takes away again
        options = {key: value for key, value in options.items() if key not in own}
        if isinstance(method, types.BuiltinMethodType) or isinstance(owner, str):
            if not any(isinstance(owner, kind) and name in names for kind, names in METHODS_OF):
                raise SecurityError(f"{type(owner).__name__}.{name} is no method for a template")
        looked_at = (owner, *args) if isinstance(owner, list | tuple) else args
        for value in (*looked_at, *options.values()):
            meter.compared(value)
        if isinstance(owner, str | int):
            _check_numbers((*args, *options.values()))
        if name == "join" and args and not isinstance(args[0], str | list | tuple | dict):
            args = (list(args[0]), *args[1:])
        if isinstance(owner, str) and name in METHODS:
            METHODS[name](meter, owner, *args, **options)
        return args
