"""The spelling of what people read: a mistake is found, code and outputs are let be."""

import nbformat
import pytest
import spelling
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

WRONG = "recie" + "ve"  # so that this file has none


@pytest.mark.parametrize("name", ["README.md", "book/a.md", "spindle/deep/a.py"])
def test_a_misspelt_word_in_a_file_is_found(name, tmp_path, capfd):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('"""Tokens that we receive."""\n')
    assert spelling.check(tmp_path) == 0
    path.write_text(f'"""Tokens that we {WRONG}."""\n')
    assert spelling.check(tmp_path) != 0
    assert f"{name}:1: {WRONG} ==> receive" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["notebooks/01_a.ipynb", "notebooks/answers/01_a.ipynb"])
def test_in_a_notebook_only_the_prose_counts(name, tmp_path, capfd):
    cell = new_code_cell(f"# {WRONG}", outputs=[new_output("stream", text=WRONG)])
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    nbformat.write(new_notebook(cells=[new_markdown_cell("# A"), cell]), path)
    assert spelling.check(tmp_path) == 0
    nbformat.write(new_notebook(cells=[new_markdown_cell(WRONG), cell]), path)
    assert spelling.check(tmp_path) != 0
    assert "01_a.md:1:" in capfd.readouterr().out
