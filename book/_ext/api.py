"""The API page: every public name, then every room, from the docstrings."""

import ast
import inspect
import itertools
import pkgutil
import re
import textwrap
from importlib import import_module
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

NAMES = r"[a-z_]\w*(?:, [a-z_]\w*)*: (?=\S)"
FIELD = re.compile(NAMES)
NEXT_FIELD = re.compile(r"(?<=[.;]) (?=" + NAMES + ")")  # in the middle of a line
OUTSIDE = re.compile(r"spindle\.(__main__|cli|bench|checkpoints)\b")


def list_the_names(app: Sphinx, docname: str, source: list[str]) -> None:
    """Fill the API page: the public names, then each room with what it defines."""
    if docname == "book/api":
        listing = "\n".join(public_names() + rooms())
        source[0] = source[0].replace("<!-- names -->", listing)


def public_names() -> list[str]:
    """A section for every name in `spindle.__all__`."""
    package = import_module("spindle")
    names = getattr(package, "__all__", [])
    return ["## Public names", *(entry("###", package, name) for name in names)]


def rooms() -> list[str]:
    """A section for every module that defines something public, without what came before."""
    package = import_module("spindle")
    shown = [getattr(package, name) for name in getattr(package, "__all__", [])]
    text = []
    for found in pkgutil.walk_packages(package.__path__, "spindle."):
        if OUTSIDE.match(found.name):
            continue
        module = import_module(found.name)
        names = [name for name in own_names(module) if getattr(module, name) not in shown]
        if module.__doc__ and names:
            text += [f"## {found.name}", rst(f".. automodule:: {found.name}")]
            text += [entry("###", module, name) for name in names]
    return text


def own_names(module: ModuleType) -> list[str]:
    """The documented functions and classes that a module defines and does not hide, in order."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
        and value.__doc__
        and not name.startswith("_")
    ]


def entry(heading: str, module: ModuleType, name: str) -> str:
    """One name: a heading, which links point to, and its signature and docstring."""
    value = getattr(module, name)
    if inspect.ismodule(value):
        return f"{heading} {name}\n\nThe module `{value.__name__}`, which has its own place below."
    kind = "class" if inspect.isclass(value) else "function"
    return f"{heading} {name}\n\n{rst(f'.. auto{kind}:: {module.__name__}.{name}', '   :members:')}"


def rst(*lines: str) -> str:
    """A reStructuredText directive inside a Markdown page."""
    options = "" if len(lines) == 1 or "autofunction" in lines[0] else "\n".join(lines[1:])
    return f"```{{eval-rst}}\n{lines[0]}\n{options}\n```\n"


def plain_docstring(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Our docstrings are plain text: make them reStructuredText that says the same."""
    of_namedtuple = lines[:1] and lines[0].startswith("Alias for field number")  # no word of ours
    lines[:] = [] if of_namedtuple else to_rst(lines)


def plain_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object,
    signature: str | None, returns: str | None,
) -> tuple[str | None, str | None]:  # fmt: skip
    """What a dataclass makes afresh is `...`: `<factory>` is no Python, and none would be read."""
    return signature and signature.replace("<factory>", "..."), returns


def to_rst(lines: list[str]) -> list[str]:
    """Indented text becomes a literal block, `x: meaning` an item, everything else is escaped.

    An item goes on until a line begins with a new sentence.
    """
    out: list[str] = []
    inside = ""  # "literal", "item", or "" for a paragraph
    for at, line in enumerate(lines):
        if not line.strip():
            out.append("")
            inside = "literal" if inside == "literal" else ""
        elif line[0] == " " and inside != "item":
            if inside != "literal":
                out += ["", f".. code-block:: {language(lines[at:])}", ""]
            out.append("   " + line)
            inside = "literal"
        elif FIELD.match(line) and (inside == "item" or ended(out)):
            out += [""] + [item(part) for part in NEXT_FIELD.split(line)]
            inside = "item"
        elif bullet := re.match(r"(?:[-*]|\d+\.) ", line):
            out += ["", "- " + escaped(line[bullet.end() :])]
            inside = "item"
        elif inside == "item" and not (ended(out) and line[0].isupper()):
            rest, *parts = NEXT_FIELD.split(line.strip())
            out += ["  " + escaped(rest)] + [item(part) for part in parts]
        else:
            out += [escaped(line)] if inside == "" else ["", escaped(line)]
            inside = ""
    return [*out, ""]


def item(field: str) -> str:
    """An item of a list: a name, or several, and what it means."""
    names, meaning = field.split(": ", 1)
    return f"- ``{names}``: {escaped(meaning)}"


def language(lines: list[str]) -> str:
    """Of the indented text that `lines` begin with: as Pygments calls it."""
    block = itertools.takewhile(lambda line: not line.strip() or line[0] == " ", lines)
    text = textwrap.dedent("\n".join(block))
    if text.startswith(">>> "):
        return "pycon"
    try:
        ast.parse(text)
    except SyntaxError:
        return "text"
    return "python"


def ended(out: list[str]) -> bool:
    """Whether a sentence is over: a line that goes on with `word: ` is still part of it."""
    return not out or not out[-1] or out[-1][-1] in ".;:"


def escaped(line: str) -> str:
    """A line whose `code` is code, and in which nothing else means anything to docutils."""
    parts = re.split(r"`+(\S|\S[^`]*\S)`+", line)
    return "".join(
        f"\\ ``{part}``\\ " if at % 2 else re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", part)
        for at, part in enumerate(parts)
    )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", list_the_names)
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("autodoc-process-signature", plain_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
