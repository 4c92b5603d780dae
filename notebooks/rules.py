"""What a stored notebook must not hold, as data: a scope, a pattern, and the words for it.

`execute.py --check` reads this. A stored output is a tested fact, so it may hold nothing that
another machine, another day or another reader would see differently.
"""

import re
from pathlib import Path
from typing import Any

Cell = dict[str, Any]

MAX_LINES = 30
MAX_BYTES = 600_000
TIMED = "nbval-ignore-output"  # the tag of cells whose outputs are measurements, not facts

_FOLDERS = (
    "home|root|tmp|Users|usr|opt|var|mnt|private|work|workspace|content|srv"
)
_PATH = rf"(?<![\w./~>-])/(?:{_FOLDERS})/\w|\b[A-Z]:\\\w"
_TIME = (
    r"(?<![\w.])\d[\d,.]*\s?(?:s|ms|µs|μs|us|ns|secs?|seconds?|mins?|minutes?)\b"
    r"|\btok(?:ens)?/s\b"
)
_DEVICE = (
    r"\b(?:NVIDIA|GeForce|Tesla|Quadro|Xeon|EPYC|Ryzen|GenuineIntel|AuthenticAMD)\b|Intel\(R\)"
    r"|\b(?:RTX|GTX) ?\d{4}|\b(?:A|H|B|L|V)\d{2,3}\b(?= *(?:GPU|SXM|PCIe|\d+ ?GB))|\bApple M\d"
)
_REQUEST = (
    r"<(?:script|link|img|iframe|source|video)\b[^>]*\b(?:src|href)\s*=\s*[\"']?\s*(?:https?:)?//"
    r"|@import\b|url\(\s*[\"']?(?:https?:)?//|\bfetch\s*\(|XMLHttpRequest|\bimport\s*\(\s*[\"']https?:"
)
_MYST = (
    r"^\(\S+\)=\s*$|\{[a-z][\w:-]*\}`[^`\s]|^\s*(?:`{3,}|:{3,})\{|^\s*>\s*\[!"
)
_FILLER = (
    r"\b(?:[Ll]et[’']s|[Cc]rucial|[Pp]owerful|[Nn]ote that|[Aa]s we can see)\b"
)
_ANSWER = (
    r"\breveal\([^,()]*, *[\"'][^\"']*[\"']\)"  # a fact that nothing computes
)

CODE = [
    (_PATH, "an absolute path"),
    (
        r"^\s*#\s*(?:NBVAL_|PYTEST_VALIDATE)",
        "an nbval comment that readers see: use a tag",
    ),
    (r"\btqdm\b|progress=True", "a progress bar"),
    (r";\s*\Z", "a trailing `;`: end a plot with plt.show()"),
]
MARKDOWN = [
    (_PATH, "an absolute path"),
    (_MYST, "MyST-only syntax, which JupyterLab shows raw"),
    (_REQUEST + r"|!\[[^\]]*\]\(https?:", "a request to another host"),
    (_FILLER, "a filler word"),
]
OUTPUT = [
    (r"Traceback \(most recent call last\)", "a traceback"),
    (_PATH, "an absolute path"),
    (r"\bat 0x[0-9a-fA-F]+", "an object repr with an address"),
    (r"\d%\||\bit/s\b|\bs/it\b|\r(?!\n)", "a progress bar"),
    (_REQUEST, "a request to another host"),
    (r"\A(?:True|False)\Z", "a bare True or False: show what was compared"),
]
FACT = [  # outputs that a test compares; not the package's own source, shown by `source`
    (_TIME, f"a time or a speed outside a cell tagged {TIMED}"),
    (_DEVICE, "the name of a device"),
]


def problems(path: Path, nb: dict[str, Any]) -> list[str]:
    """Everything in the notebook `nb`, stored at `path`, that the rules refuse."""
    found = _counts(nb["cells"])
    if path.stat().st_size > MAX_BYTES:
        found.append(f"{path.stat().st_size:,} bytes: more than {MAX_BYTES:,}")
    for number, cell in enumerate(nb["cells"], 1):
        where = f"cell {number}"
        if cell["cell_type"] == "code":
            where = f"cell {number} [{cell.get('execution_count')}]"
            said = _code(cell) + _told(cell) + _answered(cell) + _outputs(cell)
        else:
            said = _matches(MARKDOWN, cell["source"]) + _dead_links(
                path.parent, cell["source"]
            )
        found += [f"{where}: {words}" for words in said]
    return [f"{path.name}, {words}" for words in found]


def _counts(cells: list[Cell]) -> list[str]:
    counts = [
        cell.get("execution_count")
        for cell in cells
        if cell["cell_type"] == "code"
    ]
    if counts == list(range(1, len(counts) + 1)):
        return []
    return [
        f"execution counts are {counts}, not 1 to {len(counts)}: run execute.py"
    ]


def _code(cell: Cell) -> list[str]:
    lines = cell["source"].count("\n") + 1
    said = (
        [f"{lines} lines: more than {MAX_LINES}"] if lines > MAX_LINES else []
    )
    if not cell["source"].strip():
        said.append("an empty code cell")
    return said + _matches(CODE, cell["source"])


def _told(cell: Cell) -> list[str]:
    """JupyterLab shows the first line of a folded output."""
    tags = cell["metadata"].get("tags", [])
    texts = ["".join(o.get("text", "")) for o in cell["outputs"][:1]]
    first = "".join(texts).strip().split("\n")[0]
    told = "hide-output" in tags and re.search(r"\bfact\b", first)
    return (
        [f"a fold whose first line tells the fact: {first!r}"] if told else []
    )


def _answered(cell: Cell) -> list[str]:
    """Code above a folded output is read first: it must not have the answer in it."""
    if "hide-input" in cell["metadata"].get("tags", []):
        first = cell["source"].partition("\n")[0]  # JupyterLab shows it
        return _matches(
            [(r"\Areveal\(", "an answer that the fold shows")], first
        )
    return _matches([(_ANSWER, "an answer in code that shows")], cell["source"])


def _outputs(cell: Cell) -> list[str]:
    timed = TIMED in cell["metadata"].get("tags", [])
    said = []
    for output in cell["outputs"]:
        if output["output_type"] == "error":
            said.append(
                f"a stored error: {output['ename']}: {output['evalue']}"
            )
        elif output.get("name") == "stderr":
            said.append(
                f"a message on stderr: {output['text'].strip().splitlines()[0]!r}"
            )
        else:
            said += _output(output, timed)
    return list(dict.fromkeys(said))


def _output(output: Cell, timed: bool) -> list[str]:
    data = output.get("data", {"text/plain": output.get("text", "")})
    quotes_source = str(data.get("text/markdown", "")).startswith("```")
    rules = OUTPUT if timed or quotes_source else OUTPUT + FACT
    texts = [text for kind, text in data.items() if kind.startswith("text/")]
    return [words for text in texts for words in _matches(rules, text)]


def _matches(rules: list[tuple[str, str]], text: str) -> list[str]:
    said = []
    for pattern, words in rules:
        if hit := re.search(pattern, text, re.MULTILINE):
            said.append(f"{words}: {hit.group().strip()[:60]!r}")
    return said


def _dead_links(folder: Path, text: str) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)", text)
    local = [
        link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)
    ]
    return [
        f"a link to nothing: {link}"
        for link in local
        if not (folder / link).exists()
    ]
