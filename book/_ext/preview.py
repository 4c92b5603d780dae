"""What a page looks like where somebody passes its link on: a title, a question, a picture.

A chapter's description is its first sentences, as many as fit, and its opening question; its
picture is its first figure. Other pages have their first paragraph, and the figure of the cover.
Addresses of pictures are absolute where the site's own is known (html_baseurl), as most readers of
such a preview ask for; else they are relative.
"""

import re
from html import escape
from posixpath import basename
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from sphinx.application import Sphinx

CARD = "_static/cover.png"
LENGTH = 240  # characters; what a preview shows of a description
SENTENCE = re.compile(r"(?<=[.?!:]) +")
TAG = '<meta {}="{}" content="{}">'


def describe(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add the tags to the head of a page that was written by somebody."""
    if doctree is None:
        return
    title = nodes.Text(next(iter(doctree.findall(nodes.title))).astext())
    if title == app.config.project:
        context["docstitle"] = ""  # or the cover would be called "spindle - spindle"
    text = description(doctree, pagename)
    image = context["pathto"](picture(app, doctree), 1)
    if app.config.html_baseurl:
        image = app.config.html_baseurl.rstrip("/") + "/" + picture(app, doctree)
    named = {"description": text, "twitter:card": "summary_large_image"}
    properties = {"og:title": title, "og:description": text, "og:image": image}
    properties |= {"og:type": "article", "og:site_name": app.config.project}
    tags = [TAG.format("name", name, escape(value)) for name, value in named.items()]
    tags += [TAG.format("property", name, escape(value)) for name, value in properties.items()]
    context["metatags"] = "\n".join([context.get("metatags", ""), *tags])


def picture(app: Sphinx, doctree: nodes.document) -> str:
    """The first figure of a page, or the card of the cover, as a path from the site's root."""
    copied = set(app.builder.images.values())
    names = (unquote(basename(node["uri"])) for node in doctree.findall(nodes.image))
    return next((f"_images/{name}" for name in names if name in copied), CARD)  # written by now


def description(doctree: nodes.document, docname: str) -> str:
    """One to three sentences of a page's own."""
    paragraphs = [
        node
        for node in doctree.findall(nodes.paragraph)
        if node.astext().strip() and not isinstance(node.parent, nodes.entry)  # of a table
    ]
    if "/answers/" in docname:
        return "Worked answers to the exercises of this chapter: predict, break, build."
    for at, paragraph in enumerate(paragraphs[:8]):
        for bold in paragraph.findall(nodes.strong):
            if "?" in bold.astext() and docname.startswith("notebooks/"):
                before = " ".join(node.astext() for node in paragraphs[: at + 1])
                return question(before[: before.rindex(bold.astext())], bold.astext())
    return beginning(paragraphs[0].astext()) if paragraphs else ""


def question(before: str, asked: str) -> str:
    """A question, and the first sentences of what leads up to it, as many as fit."""
    lead, asked = " ".join(before.split()), " ".join(asked.split())
    first = beginning(lead, LENGTH - len(asked))
    return f"{first}{'' if first == lead else ' …'} {asked}".strip()


def beginning(text: str, length: int = LENGTH) -> str:
    """The first sentences of a text, as many as fit, and one at the least."""
    first, *sentences = SENTENCE.split(" ".join(text.split()))
    for sentence in sentences:
        if len(first) + 1 + len(sentence) > length:
            break
        first = f"{first} {sentence}"
    return first


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
