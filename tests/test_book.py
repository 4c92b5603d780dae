"""The book: it builds without a warning, asks nobody for anything, and its links lead somewhere."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from urllib.parse import unquote, urlsplit

import docutils.core
import nbformat
import pytest
from bs4 import BeautifulSoup
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import spindle

ROOT = Path(__file__).parent.parent
BOOK = ROOT / "book"


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make book` runs, over the repository at `root`, into `out`."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    command += ["-c", str(root / "book"), "-d", str(out / "trees"), str(root), str(out / "html")]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built book."""
    out = tmp_path_factory.mktemp("book")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, BeautifulSoup]:
    found = {path: BeautifulSoup(path.read_text("utf-8"), "html.parser") for path in html(site)}
    assert site / "book/index.html" in found
    return found


def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def load(folder: Path) -> types.ModuleType:
    """The conf.py in `folder` as a module."""
    spec = importlib.util.spec_from_file_location("book_conf", folder / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def conf():
    return load(BOOK)


# --- nothing from elsewhere ----------------------------------------------------------------------


def test_no_page_asks_another_host_for_anything(pages):
    """Scripts, styles, fonts, pictures and frames are all in the folder; links may lead away."""
    asked = [
        (path.name, tag.name, url)
        for path, page in pages.items()
        for tag in page.find_all(["script", "link", "img", "iframe", "source", "video", "form"])
        for url in (tag.get("src"), tag.get("href"), tag.get("action"))
        if url and re.match(r"(?:https?:)?//", url)
    ]
    assert asked == []


def test_no_style_asks_another_host_for_anything(site):
    text = {path.name: path.read_text("utf-8") for path in site.rglob("*.css")}
    assert "katex.min.css" in text and "book.css" in text
    assert not [
        name for name in text if re.search(r"(?:url\(\W*|@import\W*)(?:https?:)?//", text[name])
    ]


def test_no_inline_script_or_script_of_the_book_loads_from_elsewhere(site, pages):
    scripts = [tag.get_text() for page in pages.values() for tag in page.find_all("script")]
    scripts += [path.read_text("utf-8") for path in site.rglob("katex_autorenderer.js")]
    assert not [text for text in scripts if re.search(r"cdn|(?:fetch|import)\(\W*https?:", text)]


def test_every_font_that_katex_names_is_there(site):
    style = next(site.rglob("katex.min.css"))
    fonts = re.findall(r"url\(([^)]+)\)", style.read_text("utf-8"))
    assert len(fonts) == 20
    assert all((style.parent / font).is_file() for font in fonts)


def test_the_katex_script_and_style_are_of_one_version(site):
    import sphinxcontrib.katex

    style = next(site.rglob("katex.min.css")).read_text("utf-8")
    assert f'content:"{sphinxcontrib.katex.katex_version}"' in style


# --- links ---------------------------------------------------------------------------------------


def test_every_link_inside_the_book_leads_to_a_page_and_a_place(pages):
    places = {
        path: {
            tag[key] for tag in page.find_all(True) for key in ("id", "name") if tag.has_attr(key)
        }
        for path, page in pages.items()
    }
    dead = []
    for path, page in pages.items():
        for tag in page.find_all(["a", "img", "script", "link"]):
            url = urlsplit(tag.get("href") or tag.get("src") or "")
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            known = places.get(target, {""}) | {""}
            if not target.exists() or unquote(url.fragment) not in known:
                dead.append((path.name, url.geturl()))
    assert dead == []


def test_the_front_door_leads_to_the_cover(site):
    page = BeautifulSoup((site / "index.html").read_text("utf-8"), "html.parser")
    assert (site / page.a["href"]).is_file()


def test_every_notebook_is_a_page_reached_from_the_cover(site, pages):
    cover = pages[site / "book/index.html"]
    linked = {tag.get("href") for tag in cover.find_all("a")}
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/answers/*.ipynb")]:
        page = path.relative_to(ROOT).with_suffix(".html").as_posix()
        assert (site / page).is_file() and f"../{page}" in linked


# --- what is on the pages ------------------------------------------------------------------------


def test_the_cover_says_the_figures_that_its_drawing_shows(conf):
    from spindle.plots import Machine

    machine = Machine(**conf.MACHINE)
    text = (BOOK / "index.md").read_text("utf-8")
    passes, tokens = machine.memory_bound(1), machine.compute_bound()
    assert f"**{passes:.0f}** passes a second" in " ".join(text.split())
    assert f"about **{round(tokens, -1):.0f}** tokens a second" in " ".join(text.split())
    assert f"gets **{conf.HUGGING_FACE_TOK_S:.0f}**" in text
    assert f"{conf.HUGGING_FACE_TOK_S} tokens a second" in " ".join(text.split())
    assert 9.5 < machine.knee() < 10.5 and "at ten rows" in text


def test_the_cover_has_its_drawing(site):
    assert (site / "_static/cover.png").read_bytes().startswith(b"\x89PNG")


def test_every_public_name_has_a_place_on_the_api_page(site, pages):
    page = pages[site / "book/api.html"]
    for name in spindle.__all__:
        section = page.find(id=re.compile(rf"^{re.escape(name.lower()).replace('_', '[-_]')}$"))
        assert section is not None and section.find(re.compile("h[23]")), name


def test_every_error_has_a_place_that_a_notebook_can_link_to(site, pages):
    page = pages[site / "book/api.html"]
    tree = ast.parse((ROOT / "spindle/errors.py").read_text("utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert names and all(page.find(id=name.lower()) for name in names)


def test_notation_defines_the_whole_alphabet():
    text = (BOOK / "notation.md").read_text("utf-8")
    for letter in ["T", "R", "S", "H", "Hk", "D", "E", "V", "L", "N", "P"]:
        assert re.search(rf"^\| `{letter}` \|", text, re.MULTILINE), letter


def test_the_glossary_is_in_alphabetical_order():
    text = (BOOK / "glossary.md").read_text("utf-8").split("```{glossary}")[1]
    terms = re.findall(r"^(\w.*)$", text, re.MULTILINE)
    assert len(terms) > 20 and terms == sorted(terms, key=str.lower)


def test_there_is_one_search_box(site, pages):
    for name in ("index", "notation"):
        boxes = pages[site / f"book/{name}.html"].select(".search-button-field")
        assert [bool(box.find_parent(class_="bd-sidebar-primary")) for box in boxes] == [True]


def test_buttons_that_need_a_repository_wait_for_one(conf, tmp_path):
    named = {"repository_url", "use_edit_page_button", "use_issues_button"}
    urls = conf.PROJECT.get("urls", {})
    assert named.isdisjoint(conf.html_theme_options) == ("Repository" not in urls)
    shutil.copytree(BOOK, tmp_path / "book", ignore=shutil.ignore_patterns("_build"))
    text = (ROOT / "pyproject.toml").read_text("utf-8").replace("[project.urls]", "[tool.unused]")
    urls = '\n[project.urls]\nRepository = "https://example.org/spindle"\n'
    (tmp_path / "pyproject.toml").write_text(text + urls)
    options = load(tmp_path / "book").html_theme_options
    assert options["repository_url"] == "https://example.org/spindle" and named <= set(options)


# --- a failure is a failure, an option an option -------------------------------------------------


def small_copy(root: Path, output: dict) -> Path:
    """The book's settings over one notebook with this output, and a cover that leads to it."""
    shutil.copytree(BOOK, root / "book", ignore=shutil.ignore_patterns("_build", "*.md"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "book/index.md").write_text("# A\n\n```{toctree}\n../notebooks/01_a\n```\n")
    cell = new_code_cell("1 / 0", execution_count=1, outputs=[output])
    (root / "notebooks").mkdir()
    nb = new_notebook(cells=[new_markdown_cell("# B"), cell])
    nb.metadata["language_info"] = {"name": "python"}
    nbformat.write(nb, root / "notebooks/01_a.ipynb")
    return root


OUTPUTS = {
    "failed": new_output("error", ename="ZeroDivisionError", evalue="by zero", traceback=["x"]),
    "went well": new_output("stream", text="0\n"),
}


@pytest.mark.parametrize("which", OUTPUTS)
def test_a_failed_cell_fails_the_build(which, tmp_path):
    """B120: and only that does, in the same copy of the book."""
    done = build(small_copy(tmp_path / "root", OUTPUTS[which]), tmp_path)
    words = "notebooks/01_a, cell 2 failed when it was run: ZeroDivisionError: by zero"
    assert (done.returncode != 0) == (words in done.stderr) == (which == "failed"), done.stderr


UNKNOWN = """
import json, sys, types
from sphinx.application import Sphinx
folder, out = sys.argv[1:]
app = Sphinx(folder, folder, out, out, "dummy", status=None, warning=None)
set_here = {"__file__": folder + "/conf.py", "__name__": "conf"}
exec(open(folder + "/conf.py").read(), set_here)
options = [
    name for name, value in set_here.items()
    if name == name.lower() and not name.startswith("_")
    and not callable(value) and not isinstance(value, types.ModuleType)
]
unknown = [name for name in options if name not in app.config and name != "extensions"]
print(json.dumps([options, unknown]))
"""


def unknown_options(folder: Path, out: Path) -> tuple[list[str], list[str]]:
    """The options that a conf.py sets, and those of them that no loaded extension registers."""
    command = [sys.executable, "-c", UNKNOWN, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_every_option_of_conf_is_registered_by_an_extension(tmp_path):
    """B122: a misspelt nb_ or myst_ option is silently ignored by Sphinx."""
    root = small_copy(tmp_path / "root", OUTPUTS["went well"])
    with open(root / "book/conf.py", "a") as file:
        file.write('\nnb_execution_mod = "off"\nmyst_heading_anchor = 4\n')
    options, unknown = unknown_options(root / "book", tmp_path / "out")
    assert {"nb_execution_mode", "myst_enable_extensions", "katex_css_path"} <= set(options)
    assert unknown == ["nb_execution_mod", "myst_heading_anchor"]  # and none of our own


# --- docstrings ----------------------------------------------------------------------------------


def doctree(conf, lines: list[str]):
    """What docutils makes of a converted docstring; any complaint of its is an error."""
    settings = {"report_level": 2, "halt_level": 2, "file_insertion_enabled": False}
    text = "\n".join(conf.to_rst(lines))
    return docutils.core.publish_doctree(text, settings_overrides=settings)


def test_a_plain_docstring_says_the_same_in_the_book(conf):
    lines = [
        "One sentence of `code`, x_ and *args, a |bar|, 2**63 and <this>.",
        "",
        "top_k: keep the k likeliest;",
        "0 keeps all.",
        "top_p, min_p: fractions.",
        "Raises RequestError, naming the field.",
        "",
        "    Tree",
        "    ├── a * b",
        "      deeper `x",
        "",
        "The end:",
        "",
        "- one",
        "  and more",
        "- two",
    ]
    tree = doctree(conf, lines)
    assert tree[0].astext() == "One sentence of code, x_ and *args, a |bar|, 2**63 and <this>."
    assert [item.astext() for item in tree[1]] == [
        "top_k: keep the k likeliest;\n0 keeps all.",
        "top_p, min_p: fractions.",
    ]
    assert tree[2].astext() == "Raises RequestError, naming the field."
    assert tree[3].tagname == "literal_block"
    assert tree[3].astext() == "Tree\n├── a * b\n  deeper `x"
    assert [item.astext() for item in tree[5]] == ["one\nand more", "two"]


@settings(deadline=None)  # a loaded machine is no fault of ours
@given(st.lists(st.text("ab `*_|<>\\-:.1=#[]", max_size=14), max_size=8))
def test_no_docstring_however_odd_breaks_the_book(conf, lines):
    doctree(conf, [line.rstrip() for line in lines])
