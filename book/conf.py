"""The book: the notebooks as they are stored, and a few pages around them.

    python -m sphinx -b html -W --keep-going -c book . book/_build/html

The repository is the source folder, so that links between notebooks and pages hold there and here.
Nothing is run: nbval has just compared the stored outputs. Nothing is fetched, now or by a reader's
browser: KaTeX's style and its woff2 fonts (0.16.22) lie in _static/katex, its script comes with
sphinxcontrib-katex.
"""

import inspect
import json
import pkgutil
import re
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

project = "spindle"
version = release = PROJECT["version"]
language = "en"
html_title = project

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.bibtex",
    "sphinxcontrib.katex",
]
root_doc = "book/index"
include_patterns = ["book/*.md", "notebooks/*.ipynb", "notebooks/answers/*.ipynb"]
exclude_patterns = [".venv", ".git", "book/_build", "**/.ipynb_checkpoints"]
suppress_warnings = ["ref.python"]  # two rooms may have a class of the same name

nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "unsrt"
katex_css_path = "katex/katex.min.css"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_extra_path = ["_extra"]
html_css_files = ["book.css"]
html_favicon = "_static/favicon.svg"
html_show_copyright = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "spindle", "alt_text": "spindle: to the cover"},
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "footer_content_items": [],
}
if REPOSITORY := PROJECT.get("urls", {}).get("Repository"):
    html_theme_options |= {
        "repository_url": REPOSITORY,
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
    }


# --- the figure on the cover -------------------------------------------------------------------

# Measured with torch 2.13.0 and transformers 5.24 on two cores of an x86-64 server with AVX-512:
# SmolLM2-135M-Instruct in float32, one greedy stream.
MACHINE = {
    "name": "two cores, SmolLM2-135M, float32",
    "weights_bytes": 0.538e9,
    "memory_bytes_per_s": 29e9,
    "flops_per_token": 0.27e9,
    "flops_per_s": 140e9,
}
HUGGING_FACE_TOK_S = 7.9


def draw_cover(app: Sphinx) -> None:
    """Draw the one question from its figures, among the static files of this build."""
    if app.builder.format != "html":
        return
    import matplotlib

    matplotlib.use("agg")
    from spindle import plots

    folder = Path(app.doctreedir) / "drawn"
    folder.mkdir(parents=True, exist_ok=True)
    fig = plots.roofline_dots(
        [],
        plots.Machine(**MACHINE),
        "One stream gets 8 of the 54 passes that memory allows",
        recorded=[("Hugging Face", 1, HUGGING_FACE_TOK_S)],
    )
    fig.savefig(folder / "cover.png", dpi=200)
    app.config.html_static_path.append(str(folder))


# --- a notebook that failed is no page ----------------------------------------------------------


def refuse_failed_cells(app: Sphinx, docname: str, source: list[str]) -> None:
    """End the build if a stored notebook holds an error: the page would pass it off as output."""
    if not app.env.doc2path(docname).suffix == ".ipynb":
        return
    for number, cell in enumerate(json.loads(source[0])["cells"], 1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                what = f"{output['ename']}: {output['evalue']}"
                raise SphinxError(f"{docname}, cell {number} failed when it was run: {what}")


# --- the API page ------------------------------------------------------------------------------

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
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """Indented text becomes a literal block, `x: meaning` an item, everything else is escaped."""
    out: list[str] = []
    inside = ""  # "literal", "item", or "" for a paragraph
    for line in lines:
        if not line.strip():
            out.append("")
            inside = "literal" if inside == "literal" else ""
        elif line[0] == " " and inside != "item":
            out += [] if inside == "literal" else ["", "::", ""]
            out.append("   " + line)
            inside = "literal"
        elif field := re.match(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)", line):
            out += ["", f"- ``{field.group(1)}``: {escaped(line[field.end() :])}"]
            inside = "item"
        elif bullet := re.match(r"(?:[-*]|\d+\.) ", line):
            out += ["", "- " + escaped(line[bullet.end() :])]
            inside = "item"
        elif inside == "item" and not line.startswith("Raises "):
            out.append("  " + escaped(line.strip()))
        else:
            out += [escaped(line)] if inside == "" else ["", escaped(line)]
            inside = ""
    return [*out, ""]


def escaped(line: str) -> str:
    """A line whose `code` is code, and in which nothing else means anything to docutils."""
    parts = re.split(r"`+(\S|\S[^`]*\S)`+", line)
    return "".join(
        f"\\ ``{part}``\\ " if at % 2 else re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", part)
        for at, part in enumerate(parts)
    )


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", draw_cover)
    app.connect("source-read", refuse_failed_cells)
    app.connect("source-read", list_the_names)
    app.connect("autodoc-process-docstring", plain_docstring)
