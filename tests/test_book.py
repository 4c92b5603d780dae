"""The book: it builds without a warning, asks nobody for anything, and its links lead somewhere."""

import ast
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import docutils.core
import nbformat
import pytest
from bs4 import BeautifulSoup
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import module_of
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from sphinx.errors import SphinxError

import spindle
from spindle import lesson

ROOT = Path(__file__).parent.parent
BOOK = ROOT / "book"
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make book` runs, over the repository at `root`, into `out`."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    command += ["-c", str(root / "book"), "-d", str(out / "trees"), str(root), str(out / "html")]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id) -> Path:
    """The folder of the built book, which the workers of one run share."""
    base = tmp_path_factory.getbasetemp()
    out = (base if worker_id == "master" else base.parent) / "book"
    with FileLock(f"{out}.lock"):
        if not (out / "well").exists():
            done = build(ROOT, out)
            assert done.returncode == 0, done.stderr
            (out / "well").touch()
    return out / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, BeautifulSoup]:
    found = {path: BeautifulSoup(path.read_text("utf-8"), "html.parser") for path in html(site)}
    assert site / "book/index.html" in found
    return found


def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


@pytest.fixture(scope="module")
def conf():
    """The settings; what they load, `_ext` among it, can be imported from then on."""
    return module_of(BOOK / "conf.py")


@pytest.fixture(scope="module")
def links():
    return module_of(BOOK / "links.py")


@pytest.fixture(scope="module")
def look():
    """The module behind `make book-check`."""
    return module_of(BOOK / "check.py")


@pytest.fixture(scope="module")
def ext(conf) -> types.SimpleNamespace:
    """The modules of book/_ext, by name."""
    names = ("api", "calculator", "front", "names", "notebooks", "parts", "preview")
    return types.SimpleNamespace(**{n: importlib.import_module(f"_ext.{n}") for n in names})


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


def test_every_link_inside_the_book_leads_to_a_page_and_a_place(site, links):
    assert list(links.dead(site)) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path, links, capsys):
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">b</a> <a href="#x">x</a>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#y">a</a> <img src="c.png">')
    assert links.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "b.html: a.html#y: no such place on the page"
    assert said[1:] == ["b.html: c.png: no such file", "2 pages, 2 dead links"]
    assert links.main([str(tmp_path / "nowhere")]) == 1  # and no page at all is no success


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


def test_the_cover_says_the_figures_that_its_drawing_shows(site, pages, ext):
    from spindle.plots import Machine

    machine = Machine(**ext.front.MACHINE)
    cover = pages[site / "book/index.html"]
    said = [tag.get_text() for tag in cover.select(".bounds dd")]
    assert said == ["8", "54", "520"]
    assert [round(float(one)) for one in said[:2]] == [
        round(ext.front.HUGGING_FACE_TOK_S),
        round(machine.memory_bound(1)),
    ]
    assert round(machine.compute_bound(), -1) == 520 and "8 of 54" in ext.front.TITLE
    assert f"{machine.weights_bytes / 1e9} GB" in cover.get_text()
    assert f"measured at {ext.front.HUGGING_FACE_TOK_S}" in " ".join(cover.get_text().split())
    assert "ten rows" not in cover.get_text() or round(machine.knee()) == 10


def test_the_cover_has_its_drawing_for_a_page_and_for_a_phone(site):
    for name in ("cover.png", "cover-narrow.png"):
        assert (site / "_static" / name).read_bytes().startswith(b"\x89PNG")


def test_the_player_on_the_cover_is_complete_without_scripts(site, pages):
    cover = pages[site / "book/index.html"]
    table = cover.find("table")
    assert len(table.find_all("tr")) == 5  # four ways, and what the columns are
    assert cover.find(string=re.compile("<!-- ")) is None  # no piece of it is missing


def test_the_riddle_shows_what_the_chapter_printed(ext):
    path = ROOT / f"{ext.front.CHAPTER}.ipynb"
    answers, broken = ext.front.told(path)
    cells = json.loads(path.read_text("utf-8"))["cells"]
    outputs = ["".join(o.get("text", [])) for cell in cells for o in cell.get("outputs", [])]
    printed = next(text for text in outputs if text.startswith("right:\n"))
    right, wrong = re.match(r"right:\n(.*?)\n\nbroken:\n(.*?)\n\n", printed, re.S).groups()
    other = next(name for name in answers if name != broken)
    assert " ".join(wrong.split()) == answers[broken] and right == answers[other]
    assert any(f"fact {broken}\n" in text for text in outputs)
    (layers,) = re.findall(r"^fact (\d+) layers", printed, re.M)
    assert layers not in "".join(ext.front.choice(name, "", broken) for name in answers)


def test_either_choice_opens_the_museum_at_the_fault(site, pages, ext):
    choices = pages[site / "book/index.html"].select(".riddle details")
    assert [one.a["href"] for one in choices] == [ext.front.FAULT] * 2
    assert pages[site / "book/museum.html"].find(id=ext.front.FAULT.partition("#")[2])
    assert [one.p.get_text().startswith("Yes") for one in choices] == [False, True]  # B


# --- the calculator ------------------------------------------------------------------------------


def inputs(seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    return {
        "weights_m": 10 ** draw.uniform(0, 5),
        "weight_bytes": draw.choice([0.5, 1, 2, 4]),
        "memory_gb_s": 10 ** draw.uniform(0, 4),
        "gflop_s": 10 ** draw.uniform(1, 6),
        "k": draw.randint(1, 16),
        "acceptance": draw.choice([0, 100, draw.uniform(0, 100), draw.uniform(50, 100)]),
        "draft_cost": draw.choice([0, draw.uniform(0, 0.5)]),
    }


TRIED = [inputs(seed) for seed in range(50)]


def test_the_calculator_is_the_package_s_arithmetic(ext):
    for typed in TRIED:
        found = ext.calculator.figures(**typed)
        nbytes, knee = 1e6 * typed["weights_m"] * typed["weight_bytes"], found["knee_rows"]
        speeds = 1e9 * typed["memory_gb_s"], 1e9 * typed["gflop_s"]
        assert found["passes_s"] == pytest.approx(speeds[0] / nbytes, rel=1e-12)
        assert knee == pytest.approx(lesson.knee_rows.right(typed["weight_bytes"], *speeds))
        assert found["tokens_s"] == pytest.approx(knee * found["passes_s"])


def test_the_calculator_s_break_evens_are_where_nothing_is_gained(ext):
    seen = {"share": 0, "users": 0}
    for typed in TRIED:
        found = ext.calculator.figures(**typed)
        if found["break_even"]:
            seen["share"] += 1
            there = ext.calculator.figures(**typed | {"acceptance": found["break_even"]})
            assert there["speedup"] == pytest.approx(1)
        if found["users"] is not None:
            seen["users"] += 1
            rows, k = found["users"] / found["knee_rows"], typed["k"]
            without, price = max(1, rows), max(1, rows * (k + 1)) + k * typed["draft_cost"]
            assert found["tokens_pass"] * without / price == pytest.approx(1)
        elif found["knee_rows"] > typed["k"] + 1:
            assert found["speedup"] <= 1  # the rows are free, and still nothing is gained
    assert min(seen.values()) >= 10


NODE = """
const { figures, short } = require(process.argv[1]);
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(given.map((one) => {
  const found = figures(one);
  return [found, Object.values(found).map((value) => value === null ? null : short(value))];
})));
"""


def test_the_page_s_script_has_the_same_formulas(ext):
    node = shutil.which("node")
    if node is None:
        pytest.skip("NOT CHECKED: no node here to run calculator.js")
    command = [node, "-e", NODE, str(BOOK / "_static/calculator.js")]
    done = subprocess.run(command, input=json.dumps(TRIED), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for typed, (values, texts) in zip(TRIED, json.loads(done.stdout), strict=True):
        expected = ext.calculator.figures(**typed)
        assert values.keys() == expected.keys()
        for (name, value), text in zip(expected.items(), texts, strict=True):
            assert (values[name] is None) == (value is None), (typed, name)
            if value is not None:
                assert values[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (typed, name)
                assert text == ext.calculator.short(value) or "e" in ext.calculator.short(value)


def test_the_calculator_shows_its_results_without_scripts(site, pages, ext):
    form = pages[site / "book/index.html"].find("form", class_="calculator")
    typed = {tag["name"]: float(tag["value"]) for tag in form.find_all("input")}
    found = ext.calculator.figures(**typed | {"k": int(typed["k"])})
    shown = {tag["data-result"]: tag.get_text() for tag in form.find_all("output")}
    assert shown == {name: ext.calculator.short(value) for name, value in found.items()}
    assert all(tag.find_parent("label") for tag in form.find_all("input"))


# --- figures, previews, the archive --------------------------------------------------------------


def test_every_picture_says_in_words_what_it_shows(pages):
    bad = [
        (path.name, tag.get("src"))
        for path, page in pages.items()
        for tag in page.find_all("img")
        if len(tag.get("alt") or "") < 12 or ".png" in tag["alt"]
    ]
    assert bad == []


def test_every_figure_and_player_of_a_notebook_has_a_place_of_its_own(pages):
    count = 0
    for path, page in pages.items():
        boxes = [tag["id"] for tag in page.select(".figure-box")]
        assert boxes == [f"figure-{number}" for number in range(1, len(boxes) + 1)]
        for box in page.select(".figure-box, .player-box"):
            assert box.find("a", class_="headerlink")["href"] == f"#{box['id']}"
        count += len(boxes)
        if path.parent.name == "notebooks":
            assert len(boxes) == len(page.select(".cell_output img")) > 0, path.name
    assert count > 40


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_figure_that_a_notebook_stores_has_words_for_it(ext, path):
    assert all(len(words) > 30 for words in ext.notebooks.alternatives(path))


def test_every_page_can_be_passed_on(site, pages):
    """A title, a description of a line or three, and a picture that is there."""
    descriptions = {}
    for path, page in pages.items():
        if path.name in ("search.html", "index.html") and path.parent == site:
            continue
        tags = {
            tag.get("property") or tag.get("name"): tag["content"]
            for tag in page("meta")
            if tag.get("content")
        }
        title = page.h1.get_text().rstrip("#")
        assert tags["og:title"] == title
        assert page.title.get_text() == (title if title == "spindle" else f"{title} \u2014 spindle")
        assert 30 < len(tags["og:description"]) < 420, path.name
        assert tags["twitter:card"] == "summary_large_image"
        assert (path.parent / tags["og:image"]).is_file()
        if path.parent.name == "notebooks":
            descriptions[path.name] = tags["description"]
            assert tags["og:image"] in [image["src"] for image in page.select(".figure-box img")]
    assert len(set(descriptions.values())) == len(descriptions)
    ends = "In those steps, what share of the slots that are held has a token in it?"
    assert descriptions["07_paging.html"].endswith(ends)
    assert all("?" in text for text in descriptions.values()), descriptions


def test_all_notebooks_come_in_one_file(site, pages, ext):
    archive = site / "_static" / ext.notebooks.ARCHIVE
    with zipfile.ZipFile(archive) as packed:
        assert packed.namelist() == sorted(packed.namelist())
        words, *names = packed.namelist()
        assert "import the package" in packed.read(words).decode()
        for name in names:
            assert packed.read(name) == (ROOT / name).read_bytes()
        assert len(names) == len(list(ROOT.glob("notebooks/**/*_*.ipynb")))
    assert f"../_static/{ext.notebooks.ARCHIVE}" in str(pages[site / "book/index.html"])


def test_the_archive_has_the_same_bytes_whenever_it_is_made(tmp_path, ext):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/01_a.ipynb").write_text("{}")
    archives = []
    for when in (1e9, 1.5e9):
        out = tmp_path / str(when)
        (out / "_static").mkdir(parents=True)
        os.utime(tmp_path / "notebooks/01_a.ipynb", (when, when))
        app = types.SimpleNamespace(
            builder=types.SimpleNamespace(format="html"), srcdir=tmp_path, outdir=out
        )
        ext.notebooks.pack(app, None)
        archives.append((out / "_static" / ext.notebooks.ARCHIVE).read_bytes())
    assert archives[0] == archives[1]


# --- the table of contents -----------------------------------------------------------------------


def test_chapters_stand_in_their_parts_in_order(site, pages, ext):
    bar = pages[site / "book/index.html"].select_one(".bd-sidebar-primary nav.bd-links")
    captions = [tag.get_text().strip() for tag in bar.select(".caption")]
    assert captions == [caption for caption, _ in ext.parts.PARTS if caption]
    entries = [tag.get_text().strip() for tag in bar.select("li.toctree-l1 > a")]
    chapters = [one[:2] for one in entries if re.match(r"\d\d ·", one)]
    assert chapters == [f"{n:02}" for n in range(19)]


def test_a_chapter_in_no_part_ends_the_build(tmp_path, ext):
    for name in ("00_a", "13_b", "D_c"):
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        (tmp_path / f"notebooks/{name}.ipynb").write_text("{}")
    with pytest.raises(SphinxError, match=r"in no part of the book .*: D_c$"):
        ext.parts.parts(tmp_path)
    (tmp_path / "notebooks/D_c.ipynb").unlink()
    assert re.findall(r":caption: (.*)|notebooks/(\w+)", ext.parts.parts(tmp_path)) == [
        ("", "00_a"),
        ("One user, fast", ""),
        ("", "13_b"),
    ]


# --- what the pages hold -------------------------------------------------------------------------


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


def test_buttons_that_need_a_repository_wait_for_one(conf, site, pages):
    named = {"repository_url", "use_edit_page_button", "use_issues_button", "launch_buttons"}
    assert named.isdisjoint(conf.html_theme_options) == ("Repository" not in conf.URLS)
    page = str(pages[site / "notebooks/07_paging.html"].select_one(".header-article-items"))
    assert "_sources/notebooks/07_paging.ipynb" in page  # a download needs nobody
    assert ("mybinder" in page) == ("Repository" in conf.URLS)


# --- a failure is a failure, an option an option -------------------------------------------------


def small_copy(root: Path, output: dict) -> Path:
    """The book's settings over one notebook with this output, and a cover that leads to it."""
    shutil.copytree(BOOK, root / "book", ignore=shutil.ignore_patterns("_build", "*.md"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "book/index.md").write_text(
        "# A\n\nb <!-- launch -->\n\n```{toctree}\n../notebooks/01_a\n```\n"
    )
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


def test_a_failed_cell_fails_the_build(tmp_path):
    """B120: and only that does, as the next test builds the same book without it."""
    done = build(small_copy(tmp_path / "root", OUTPUTS["failed"]), tmp_path)
    words = "notebooks/01_a, cell 2 failed when it was run: ZeroDivisionError: by zero"
    assert done.returncode != 0 and words in done.stderr


def test_a_repository_and_a_site_are_linked_where_the_project_names_them(tmp_path):
    root = small_copy(tmp_path / "root", OUTPUTS["went well"])
    text = (ROOT / "pyproject.toml").read_text("utf-8").replace("[project.urls]", "[tool.unused]")
    urls = '\n[project.urls]\nRepository = "https://github.com/example/spindle"\n'
    urls += 'Documentation = "https://example.org/book/"\n'
    (root / "pyproject.toml").write_text(text + urls)
    done = build(root, tmp_path)
    assert done.returncode == 0, done.stderr
    cover = (tmp_path / "html/book/index.html").read_text("utf-8")
    assert "%pip install git+https://github.com/example/spindle" in cover
    page = (tmp_path / "html/notebooks/01_a.html").read_text("utf-8")
    place = "example/spindle/blob/main/notebooks/01_a.ipynb"
    assert f"https://colab.research.google.com/github/{place}" in page
    assert "mybinder.org/v2/gh/example/spindle/main?urlpath=lab/tree/notebooks/01_a.ipynb" in page
    assert "https://github.com/example/spindle/edit/main/notebooks/01_a.ipynb" in page
    assert "https://github.com/example/spindle/issues/new" in page
    assert '"og:image" content="https://example.org/book/_static/cover.png"' in page


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


def doctree(api, lines: list[str]):
    """What docutils makes of a converted docstring; any complaint of its is an error."""
    settings = {"report_level": 2, "halt_level": 2, "file_insertion_enabled": False}
    text = "\n".join(api.to_rst(lines))
    return docutils.core.publish_doctree(text, settings_overrides=settings)


def test_signatures_are_read_as_python(site):
    text = (site / "book/api.html").read_text("utf-8")
    assert "factory" not in text
    assert not re.search(r"~[a-z]+\.[a-z]", text)


def test_a_field_of_a_named_tuple_has_no_words_that_are_not_ours(site):
    assert "Alias for field number" not in (site / "book/api.html").read_text("utf-8")


def test_a_plain_docstring_says_the_same_in_the_book(ext):
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
    tree = doctree(ext.api, lines)
    assert tree[0].astext() == "One sentence of code, x_ and *args, a |bar|, 2**63 and <this>."
    assert [item.astext() for item in tree[1]] == [
        "top_k: keep the k likeliest;\n0 keeps all.",
        "top_p, min_p: fractions.",
    ]
    assert tree[2].astext() == "Raises RequestError, naming the field."
    assert tree[3].tagname == "literal_block"
    assert tree[3].astext() == "Tree\n├── a * b\n  deeper `x"
    assert [item.astext() for item in tree[5]] == ["one\nand more", "two"]


def test_names_in_one_line_are_items_of_their_own_and_a_new_sentence_is_not(ext):
    lines = ["k: drafts a pass; why: who", "asks. most: 3; b: 4.", "None: all. x: 5.", "The end."]
    tree = doctree(ext.api, lines)
    items = ["k: drafts a pass;", "why: who\nasks.", "most: 3;", "b: 4."]
    assert [item.astext() for item in tree[0]] == items
    assert tree[1].astext() == "None: all. x: 5.\nThe end."


@pytest.mark.parametrize(
    ("block", "language"),
    [("x = f(1)\n\ny", "python"), (">>> x", "pycon"), ("d_i ~ q_i, or", "text")],
)
def test_a_block_is_coloured_as_what_it_is(ext, block, language):
    indented = ["    " + line if line else line for line in block.split("\n")]
    assert f".. code-block:: {language}" in ext.api.to_rst(["So:", "", *indented, "", "x y"])


def test_a_line_that_happens_to_begin_with_a_word_and_a_colon_is_no_item(ext):
    tree = doctree(ext.api, ["It is for one, and refuses a", "second: whoever comes.", "k: few."])
    assert tree[0].astext() == "It is for one, and refuses a\nsecond: whoever comes."
    assert [item.astext() for item in tree[1]] == ["k: few."]


@settings(deadline=None)  # a loaded machine is no fault of ours
@given(st.lists(st.text("ab `*_|<>\\-:.1=#[]", max_size=14), max_size=8))
def test_no_docstring_however_odd_breaks_the_book(ext, lines):
    doctree(ext.api, [line.rstrip() for line in lines])


def test_a_name_in_a_table_may_be_broken_between_its_words_only(ext):
    code = '<code class="a_b"><span class="pre">BlockTable.commit_all()&amp;noBr</span></code>'
    broken = code.replace("BlockTable.commit_all", "Block<wbr>Table<wbr>.commit_<wbr>all")
    broken = broken.replace("noBr", "no<wbr>Br")
    page = "<p>{}</p><table><tr><td>{}</td><th>x {}</th></tr></table>"
    assert ext.names.may_break(page.format(code, code, code)) == page.format(code, broken, broken)


def test_a_name_that_is_longer_than_a_line_may_be_broken_anywhere(ext):
    name = "test_" + "_".join(["word"] * 20)
    code = f'<code class="a"><span class="pre">{name}</span></code>'
    broken = code.replace("_word", "_<wbr>word").replace('"a"', '"long a"')
    for page in ("<p>{}</p>", "<table><tr><td>{}</td></tr></table>"):
        assert ext.names.may_break(page.format(code)) == page.format(broken)


# --- every page in a browser ---------------------------------------------------------------------

BROKEN = {
    "another host": (
        '<img src="http://example.org/a.png" alt="">',
        "asked another host: http://example.org/a.png",
    ),
    "a missing file": ('<img src="nowhere.png" alt="">', "404: "),
    "an error": ("<script>throw new Error('too late')</script>", "Error: too late"),
    "a complaint": ("<script>console.error('no table')</script>", "console: no table"),
    "too wide": ("<p style='width: 500px'>a table", "scrolls sideways at 390, light: "),
    "always light": (
        "<script>document.documentElement.dataset.theme = 'light'</script>",
        "dark: the page is light",
    ),
}


def test_each_fault_of_a_page_is_seen_and_named(tmp_path, look, capsys):
    if look.chromium() is None:
        pytest.skip("NOT CHECKED: no Chromium here to open pages in")
    head = '<!doctype html><link rel="icon" href="data:,"><body>'
    for number, (body, _) in enumerate(BROKEN.values()):
        (tmp_path / f"{number}.html").write_text(head + body)
    box = '<div style="overflow-x: auto"><p style="width: 900px">scrolls in its own box</p></div>'
    (tmp_path / "good.html").write_text(head + box)
    door = '<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0; url=good.html">'
    (tmp_path / "door.html").write_text(door)
    assert look.check(tmp_path, screenshots=tmp_path / "shots") == len(BROKEN)
    said = capsys.readouterr().out.splitlines()
    for number, (_, words) in enumerate(BROKEN.values()):
        found = [line for line in said if line.startswith(f"{number}.html: ")]
        assert found and found[0].startswith(f"{number}.html: {words}"), found
    good = ["door.html: well", "good.html: well"]
    assert said[-3:] == [*good, f"{len(BROKEN) + 2} pages, {len(BROKEN)} with faults"]
    names = [
        f"good-{width}-{scheme}-01.png" for width in (1280, 390) for scheme in ("dark", "light")
    ]
    assert sorted(path.name for path in tmp_path.glob("shots/good*")) == sorted(names)


def test_without_chromium_nothing_is_checked_and_that_is_said(tmp_path, look, monkeypatch, capsys):
    monkeypatch.setattr(look.shutil, "which", lambda name: None)
    assert look.main(["--site", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("NOT CHECKED: no Chromium here")
