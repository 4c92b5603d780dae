"""Each public name has an example in its docstring, which does what it says on the bundled models.

An example may leave out what depends on the machine; nothing else is excused.
"""

import doctest
import inspect

import pytest

import spindle

FINDER = doctest.DocTestParser()


def examples(text: str, name: str = "it") -> doctest.DocTest:
    """The lines with >>> of a docstring, with no names but those that they import."""
    return FINDER.get_doctest(text, {}, name, None, None)


def failures(test: doctest.DocTest) -> str:
    """What the examples' outputs were, where they are not as written; "" if all are."""
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


@pytest.mark.parametrize("name", spindle.__all__)
def test_the_example_of_a_public_name_runs(name):
    text = inspect.getdoc(getattr(spindle, name)) or ""
    test = examples(text, name)
    assert "Examples:\n\n    >>> from spindle import " in text
    assert len(test.examples) >= 2 and failures(test) == ""


@pytest.mark.parametrize("name", spindle.__all__)
def test_an_example_imports_the_name_and_uses_it(name):
    first, *rest = examples(inspect.getdoc(getattr(spindle, name)) or "").examples
    assert name in first.source.removeprefix("from spindle import ").replace(",", " ").split()
    assert any(name in example.source for example in rest)


def test_what_an_example_says_wrongly_is_found():
    assert failures(examples(">>> 6 * 7\n42\n")) == ""
    assert "Expected:\n    43\nGot:\n    42" in failures(examples(">>> 6 * 7\n43\n"))
    assert "NameError" in failures(examples(">>> spindle\n"))
