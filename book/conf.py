"""The book: the notebooks as they are stored, and a few pages around them.

    python -m sphinx -b html -W --keep-going -c book . book/_build/html

The repository is the source folder, so that links between notebooks and pages hold there and here.
Nothing is run: nbval has just compared the stored outputs. Nothing is fetched, now or by a reader's
browser: KaTeX's style and its woff2 fonts (0.16.22) lie in _static/katex, its script comes with
sphinxcontrib-katex.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
URLS = PROJECT.get("urls", {})
sys.path.insert(0, str(ROOT / "book"))

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
    "_ext.parts",
    "_ext.notebooks",
    "_ext.terms",
    "_ext.imports",
    "_ext.front",
    "_ext.api",
    "_ext.preview",
    "_ext.since",
    "_ext.names",
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
autodoc_preserve_defaults = True  # as they are written: time.perf_counter, not <built-in ...>
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "unsrt"
katex_css_path = "katex/katex.min.css"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_baseurl = URLS.get("Documentation", "")
html_static_path = ["_static"]
html_extra_path = ["_extra"]
html_css_files = ["book.css", "cover.css", "print.css"]
html_js_files = [("calculator.js", {"defer": "defer"})]
html_favicon = "_static/favicon.svg"
html_use_index = False  # the search finds what the index would list
html_domain_indices = False
html_show_copyright = False
html_show_sphinx = False
html_context = {"default_mode": "auto"}
html_theme_options: dict[str, Any] = {
    "logo": {"text": "spindle", "alt_text": "spindle: to the cover"},
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "github-dark-high-contrast",
    "max_navbar_depth": 2,
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "footer_content_items": [],
}
if REPOSITORY := URLS.get("Repository"):
    html_theme_options |= {
        "repository_url": REPOSITORY,
        "repository_branch": "main",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
        "launch_buttons": {
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
            "notebook_interface": "jupyterlab",
        },
    }
