"""Run notebooks in a fresh kernel and store their outputs, changing no byte that need not change.

    python notebooks/execute.py [FILES]        run, then check; all chapters and answers by default
    python notebooks/execute.py --check        check what is stored, run nothing
    python notebooks/execute.py --only 04      the files whose name holds "04"

A stored output stays when the new one is equal under the rules of sanitize.cfg (a picture: when
its pixels are), so a second run changes nothing. A cell tagged `nbval-ignore-output` keeps its
measurement for as long as the notebook's code is the same; `--refresh` measures again. A notebook
that fails is left as it was.
"""

import argparse
import base64
import copy
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from ipykernel.kernelspec import make_ipkernel_cmd
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import (
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)
from tqdm import tqdm

import rules

HERE = Path(__file__).resolve().parent
SANITIZE = re.findall(
    "^regex: (.*)$\n^replace: (.*)$",
    (HERE / "sanitize.cfg").read_text("utf-8"),
    re.MULTILINE,
)
KERNELSPEC = {
    "display_name": "Python 3",
    "language": "python",
    "name": "python3",
}
LANGUAGE = {
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
}
FOLDED = {
    "hide-output": "outputs_hidden",
    "hide-input": "source_hidden",
}  # book: lab
PIXEL_TOLERANCE = 8  # of 255: below what an eye sees, above what a font renderer's rounding does

Notebook = Any
Outputs = list[dict[str, Any]]


class NotebookFailed(Exception):
    """A cell that raised, ran too long or took its kernel down; a file that is no notebook."""


class ThisPython(AsyncKernelManager):
    """Starts ipykernel under the interpreter that runs this script, whatever is installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=make_ipkernel_cmd(), **{**KERNELSPEC, "resource_dir": ""}
        )


def read(path: Path) -> Notebook:
    """The notebook at `path`, every cell with an id that depends on its text alone."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        name_cells(raw["cells"])
        raw["nbformat"], raw["nbformat_minor"] = 4, 5
        return nbformat.reads(json.dumps(raw), as_version=4)
    except (ValueError, KeyError, TypeError, nbformat.ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise NotebookFailed(
            f"{path.name}: no notebook of format 4: {reason}"
        ) from None


def name_cells(cells: list[dict[str, Any]]) -> None:
    """Give an id to every cell without one, and a new one to every copy."""
    seen: set[str] = set()
    for cell in cells:
        source = "".join(cell["source"])
        name = cell.get("id") or hashlib.sha256(source.encode()).hexdigest()[:8]
        while name in seen:
            name = hashlib.sha256(f"{name}{source}".encode()).hexdigest()[:8]
        seen.add(name)
        cell["id"] = name


def write(path: Path, text: str) -> None:
    """Replace the file in one step, so that nobody ever sees half of it."""
    handle, name = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def code_cells(nb: Notebook) -> list[Any]:
    """The cells that run, in order."""
    return [
        cell
        for cell in nb.cells
        if cell.cell_type == "code" and cell.source.strip()
    ]


def code_hash(nb: Notebook) -> str:
    """What the stored outputs belong to: the text of all code cells, in order."""
    text = "\0".join(cell.source for cell in code_cells(nb))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_text(nb: Notebook) -> str:
    """The one way to write this notebook down: tags, no timings, no traces of an editor."""
    nb = copy.deepcopy(nb)
    stamp = {
        key: nb.metadata[key]
        for key in ("code_sha256", "spindle")  # what it needs: tests/check.py
        if key in nb.metadata
    }
    nb.metadata = {"kernelspec": KERNELSPEC, "language_info": LANGUAGE, **stamp}
    for cell in nb.cells:
        tags = list(cell.metadata.get("tags", []))
        folded = {key: True for tag, key in FOLDED.items() if tag in tags}
        cell.metadata = ({"tags": tags} if tags else {}) | (
            {"jupyter": folded} if folded else {}
        )
        if "hide-output" in tags:  # JupyterLab would add its older name for it
            cell.metadata["collapsed"] = True
    return nbformat.writes(nb).rstrip("\n") + "\n"


def sanitized(text: Any) -> Any:
    """`text` as nbval compares it."""
    for pattern, replacement in SANITIZE if isinstance(text, str) else []:
        text = re.sub(pattern, replacement, text)
    return text


def same_picture(old: str, new: str) -> bool:
    """Whether two base64 PNGs show the same: equal bytes, or no pixel visibly apart."""
    if old.strip() == new.strip():
        return True
    import numpy as np
    from PIL import Image

    images = [
        Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")
        for data in (old, new)
    ]
    if images[0].size != images[1].size:
        return False
    before, after = (np.asarray(image, dtype=np.int16) for image in images)
    return int(abs(before - after).max()) <= PIXEL_TOLERANCE


def same_output(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a stored output and a new one tell the reader the same."""
    if old["output_type"] != new["output_type"] or old.get("name") != new.get(
        "name"
    ):
        return False
    before, after = (
        out.get("data", {"text": out.get("text")}) for out in (old, new)
    )
    if before.keys() != after.keys():
        return False
    return all(
        same_picture(before[kind], after[kind])
        if kind == "image/png"
        else sanitized(before[kind]) == sanitized(after[kind])
        for kind in before
    )


def same_outputs(old: Outputs, new: Outputs) -> bool:
    """Whether a cell's stored outputs may stay."""
    return len(old) == len(new) and all(map(same_output, old, new))


def run(path: Path, stored: Notebook, timeout_s: int) -> Notebook:
    """A copy of the notebook `stored` with the outputs of a fresh kernel, counts 1 to n."""
    nb = copy.deepcopy(stored)
    client = NotebookClient(
        nb,
        timeout=timeout_s,
        kernel_manager_class=ThisPython,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.log.disabled = True
    with tqdm(
        total=len(nb.cells), desc=path.name, leave=False, disable=None
    ) as bar:
        client.on_cell_start = lambda **_: bar.update()
        try:
            client.execute(
                stderr=subprocess.DEVNULL
            )  # ipykernel's remarks on its transport
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            cell = code_cells(nb)[client.code_cells_executed - 1]
            raise NotebookFailed(
                failure(
                    path, cell, client.code_cells_executed, error, timeout_s
                )
            ) from None
    set_counts(nb)
    return nb


def set_counts(nb: Notebook) -> None:
    """Number the code cells, and the results they show, 1 to n."""
    for count, cell in enumerate(code_cells(nb), 1):
        cell.execution_count = count
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count


def failure(
    path: Path, cell: Any, count: int, error: Exception, timeout_s: int
) -> str:
    """One message: the file, the cell as Jupyter numbers it, the line, and what it raised."""
    trace = re.sub(r"\x1b\[[\d;]*m", "", getattr(error, "traceback", ""))
    hit = re.search(rf"Cell In\[{count}\], line (\d+)", trace)
    number = int(hit.group(1)) if hit else 1
    line = cell.source.splitlines()[number - 1].strip()
    if isinstance(error, CellExecutionError):
        what = f"{error.ename}: {error.evalue}"
    else:
        timed_out = isinstance(error, CellTimeoutError)
        what = (
            f"ran for more than {timeout_s} s"
            if timed_out
            else "the kernel died"
        )
    return f"{path.name}, cell [{count}], line {number}: {line}\n    {what}"


def merge(old: Notebook, new: Notebook, refresh: bool) -> int:
    """Put the stored outputs that may stay into `new`; the number of cells that changed."""
    stored = {cell.id: cell for cell in code_cells(old)}
    same_code = old.metadata.get("code_sha256") == code_hash(new)
    changed = 0
    for cell in code_cells(new):
        before = stored[cell.id]
        measured = (
            rules.TIMED in cell.metadata.get("tags", [])
            and same_code
            and not refresh
        )
        if measured or same_outputs(before.outputs, cell.outputs):
            cell.outputs = before.outputs
        else:
            changed += 1
    set_counts(new)
    new.metadata["code_sha256"] = code_hash(new)
    return changed


def execute(path: Path, timeout_s: int = 120, refresh: bool = False) -> str:
    """Run one notebook and store what changed; what was done, in words."""
    before = path.read_text("utf-8")
    old = read(path)
    new = run(path, old, timeout_s)
    changed = merge(old, new, refresh)
    after = to_text(new)
    if after == before:
        return "unchanged"
    if path.read_text("utf-8") != before:
        raise NotebookFailed(f"{path.name}: edited while it ran: run it again")
    write(path, after)
    return f"written, outputs of {changed} of {len(code_cells(new))} cells new"


def check(path: Path) -> list[str]:
    """What is wrong with the notebook as it is stored."""
    nb = read(path)
    found = rules.problems(path, nb)
    if nb.metadata.get("code_sha256") != code_hash(nb):
        found.append(
            f"{path.name}, outputs of other code than is stored: run execute.py"
        )
    if to_text(nb) != path.read_text("utf-8"):
        found.append(
            f"{path.name}, not in the form that execute.py writes: run it"
        )
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Run the notebooks, or check what they store."
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="notebooks; all of them by default"
    )
    parser.add_argument(
        "--check", action="store_true", help="run nothing, check what is stored"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="files whose name holds TEXT"
    )
    parser.add_argument(
        "--timeout", type=int, default=120, metavar="S", help="of one cell"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="measure the tagged cells again"
    )
    args = parser.parse_args(argv)
    files = args.files or sorted(HERE.glob("*.ipynb")) + sorted(
        HERE.glob("answers/*.ipynb")
    )
    args.files = [path for path in files if args.only in path.name]
    if missing := [str(path) for path in args.files if not path.is_file()]:
        parser.error(f"no such notebook: {', '.join(missing)}")
    if args.only and not args.files:
        parser.error(f"no notebook has {args.only!r} in its name")
    return args


def main(argv: list[str] | None = None) -> int:
    """0 if every notebook ran and keeps the rules, else 1."""
    args = arguments(argv)
    wrong = 0
    for path in args.files:
        try:
            done = (
                "checked"
                if args.check
                else execute(path, args.timeout, args.refresh)
            )
            found = check(path)
        except NotebookFailed as error:
            done, found = "left as it was", [str(error)]
        print(f"{path.name}: {done}", flush=True)
        for words in found:
            print(f"  {words}", file=sys.stderr, flush=True)
        wrong += bool(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
