"""Where a name in a table, or a very long one, may be broken: between its words, nowhere else.

A `<wbr>` is no character, so a name that is copied is the name.
"""

import re
from typing import Any

from sphinx.application import Sphinx

CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"(<code\b[^>]*>)(.*?)(</code>)", re.DOTALL)
BETWEEN = re.compile(r"(?<=\w)(?=\.\w)|(?<=_)(?=[a-z])|(?<=[a-z])(?=[A-Z])")
TAG = re.compile(r"(<[^>]*>|&\w+;)")
LONG = 60  # characters: more than a line of the text has room for


def may_break(body: str) -> str:
    """The HTML of a page, with a place to break between the words of such names."""
    return CELL.sub(lambda cell: CODE.sub(_broken, cell[0]), CODE.sub(_if_long, body))


def _if_long(code: re.Match[str]) -> str:
    if len(TAG.sub("", code[2])) <= LONG:
        return code[0]
    return _broken(code).replace('class="', 'class="long ', 1)


def _broken(code: re.Match[str]) -> str:
    parts = TAG.split(code[2])
    parts[::2] = [BETWEEN.sub("<wbr>", text) for text in parts[::2]]
    return code[1] + "".join(parts) + code[3]


def change(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Called for each page before it is written."""
    if doctree is not None and "body" in context:
        context["body"] = may_break(context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", change)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
