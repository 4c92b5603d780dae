"""What is public, what importing it costs, and who may import whom."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import spindle

ROOT = Path(spindle.__file__).parent


# --- names ---------------------------------------------------------------------------------------


HELPERS = {"importlib", "TYPE_CHECKING", "Any"}  # what spindle/__init__.py itself uses


def test_the_public_names_are_listed_once_and_complete():
    listed = spindle.__all__  # ruff has them sorted
    assert len(listed) == len(set(listed))
    modules = {module.name for module in pkgutil.iter_modules(spindle.__path__)}
    there = {name for name in dir(spindle) if not name.startswith("_")} - modules
    assert set(listed) == there
    assert {name for name in vars(spindle) if not name.startswith("_")} <= there | modules | HELPERS
    for name in listed:
        thing = getattr(spindle, name)
        home = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
        assert home.startswith("spindle.")


def test_import_star_gives_the_public_names_and_nothing_else():
    names: dict[str, object] = {}
    exec("from spindle import *", names)
    assert sorted(set(names) - {"__builtins__"}) == sorted(spindle.__all__)


# --- what an import costs ------------------------------------------------------------------------


def in_a_new_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_importing_spindle_brings_none_of_the_heavy_libraries():
    loaded = in_a_new_python("import sys, spindle; print(*sys.modules)").split()
    heavy = {"transformers", "matplotlib", "huggingface_hub", "gguf", "IPython", "ctranslate2"}
    assert heavy.isdisjoint(loaded)
    assert "torch" not in loaded  # it comes with the first name that needs it


def test_using_the_public_names_brings_none_of_the_heavy_libraries_but_torch():
    loaded = in_a_new_python("import sys; from spindle import *; print(*sys.modules)").split()
    heavy = {"transformers", "matplotlib", "huggingface_hub", "gguf", "IPython", "ctranslate2"}
    assert heavy.isdisjoint(loaded)
    assert "torch" in loaded and "spindle.model.weights" in loaded


def test_importing_spindle_takes_little_beyond_torch():
    """At most 0.3 s: CPU time, which a busy machine does not stretch; the least of five."""
    program = (
        "import torch, time; t = time.process_time(); from spindle import *;"
        "print(time.process_time() - t)"
    )
    assert min(float(in_a_new_python(program)) for _ in range(5)) <= 0.3


# --- who may import whom -------------------------------------------------------------------------

# A room may import itself and what stands here; a module's own line goes before its folder's.
# Only modules of spindle count. `*`: anything.
EVERYONE_MAY = ("errors", "config", "paths", "interrupts", "threads")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": (),
    "paths": (),
    "interrupts": (),
    "threads": (),
    "chat_template": ("sandbox",),
    "sandbox": (),
    "tokenizer": ("hub", "chat_template", "tokenizer_file"),
    "tokenizer_file": (),
    "recipes": ("gguf_import",),  # hub, recipes and gguf_import are the room "hub"
    "gguf_import": ("gguf_file",),
    "gguf_file": (),
    "hub": ("recipes",),
    "kernels": (),
    "kvcache": ("kernels",),
    "model": ("kernels", "parallel"),
    "model.weights": ("kernels", "parallel", "hub", "tokenizer"),
    "decode": ("kernels", "parallel", "kvcache", "model", "hub", "tokenizer"),
    "serve": (
        *("kernels", "parallel", "kvcache", "model", "hub", "tokenizer"),
        *("decode.sampling", "decode.stats", "decode.graphs", "decode.speculative"),
        *("decode.params", "decode.penalties", "decode.logprobs", "decode.detokenize"),
        *("decode.beam", "decode.drafters", "decode.pace"),
    ),
    "openai_form": (*("serve", "tokenizer", "chat_template", "decode.params", "decode.logprobs"),),
    "server": ("serve", "openai_form", "model", "tokenizer", "decode.params"),
    "batch": ("serve", "openai_form", "hub", "tokenizer", "model", "decode.params"),
    "parallel": (),  # collectives: a part's weights call them, a seed and the free memory ask them
    "checkpoints": ("hub", "tokenizer", "model", "decode", "kvcache"),
    "plots": ("player", "lesson"),
    "player": ("lesson",),
    "lesson": (),
    "bench": ("*",),
    "cli": ("*",),
    "chat": ("*",),  # the part of the command line that talks
    "launched": ("*",),  # the part of the command line that torchrun starts several of
    "together": ("*",),  # the part of the command line that runs several prompts at once
    "doctor": ("*",),  # the part of the command line that says what is missing
    "__main__": ("cli",),
    "": ("*",),  # spindle/__init__.py: the public names
}
# Libraries that one module alone may import, and those that may be imported in a function only.
ONLY_IN = {
    "matplotlib": ("plots", "bench"),
    "transformers": ("bench.peers", "gguf_import"),
    "gguf": ("gguf_import", "gguf_file", "bench.peers"),
}
NEVER = ("notebooks", "tests", "book", "conftest", "oracle")


def room_of(module: str) -> str:
    """The line of the table that a module, named from spindle on, falls under."""
    parts = module.split(".")
    while parts and ".".join(parts) not in MAY_IMPORT:
        parts.pop()
    return ".".join(parts)


def imports_of(source: str, module: str) -> Iterator[str]:
    """Dotted names that a module imports, anywhere in it; `from a import b` is both a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ["spindle", *module.split(".")][: -node.level] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def faults(source: str, module: str) -> list[str]:
    """Imports that the table forbids, in words."""
    room, found = room_of(module), set[str]()
    for name in imports_of(source, module):
        top, _, inner = name.partition(".")
        if top in NEVER:
            found.add(f"{module} imports {name}")
        if top in ONLY_IN and not module.startswith(ONLY_IN[top]):
            found.add(f"{module} imports {name}; only {', '.join(ONLY_IN[top])} may")
        if top == "spindle" and inner and not may(room, inner):
            found.add(f"{module} imports spindle.{inner}")
    return sorted(found)


def may(room: str, inner: str) -> bool:
    allowed = (*EVERYONE_MAY, *MAY_IMPORT[room])
    if "*" in allowed or inner == "__version__":
        return True
    family = room.split(".")[0]
    if inner == family or inner.startswith(f"{family}."):
        return True
    if any(one == inner or inner.startswith(f"{one}.") for one in allowed):
        return True
    # `from spindle.decode import sampling` names the package on the way to an allowed module.
    return any(one.startswith(f"{inner}.") for one in allowed)


def modules() -> dict[str, Path]:
    """Every module of the package, named from spindle on."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def test_every_module_stands_in_the_table():
    """A new room has to say what it may import; `spindle/__init__.py` is the one with no name."""
    assert [m for m in modules() if m and room_of(m) == ""] == []


@pytest.mark.parametrize("module", sorted(modules()), ids=lambda module: module or "__init__")
def test_a_module_imports_only_what_its_room_may(module):
    assert faults(modules()[module].read_text(encoding="utf-8"), module) == []


PLANTED = {
    "a model that knows caches": ("model.gpt2", "from spindle.kvcache.index import StepIndex"),
    "a cache that knows models": ("kvcache.index", "import spindle.model.layers"),
    "inside a function": ("kernels.twins", "def f():\n    from spindle import decode"),
    "by a relative path": ("kernels.twins", "from ..decode import engine"),
    "a config that knows weights": ("config", "from spindle.model import weights"),
    "the engine, served": ("serve.runner", "from spindle.decode.engine import Engine"),
    "a figure": ("kvcache.index", "import matplotlib.pyplot as plt"),
    "the oracle": ("model.llama", "from transformers import LlamaConfig"),
    "a model that fetches": ("model.llama", "from spindle import hub"),
    "a notebook": ("lesson", "import notebooks.execute"),
    "a test": ("bench.replay", "from tests import oracle"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_wrong_import_is_found(plant):
    module, source = PLANTED[plant]
    assert len(faults(source, module)) >= 1


ALLOWED = [
    ("serve.runner", "from spindle.decode import sampling, stats"),
    ("serve.runner", "from spindle.decode.sampling import SamplingRows"),
    ("model.weights", "def f():\n    from spindle import hub"),
    ("kernels.packed", "import torch\nfrom . import twins\nfrom ..errors import SpindleError"),
    ("decode.engine", "from spindle.kvcache.contiguous import ContiguousKV"),
    ("plots", "import matplotlib"),
]


@pytest.mark.parametrize(("module", "source"), ALLOWED)
def test_a_right_import_is_not(module, source):
    assert faults(source, module) == []


# --- docstrings and annotations ------------------------------------------------------------------


def public_things() -> Iterator[tuple[str, object]]:
    """Modules, functions, classes and their methods, each where it is written."""
    for name in sorted(modules()):
        if name == "__main__":
            continue
        module = importlib.import_module(".".join(filter(None, ["spindle", name])))
        yield module.__name__, module
        names = getattr(module, "__all__", vars(module))  # where there is such a list, it says
        for thing in map(vars(module).get, names):
            if getattr(thing, "__module__", "") != module.__name__:
                continue
            if not (inspect.isfunction(thing) or inspect.isclass(thing)):
                continue
            yield f"{module.__name__}.{thing.__qualname__}", thing
            if inspect.isclass(thing):
                yield from methods_of(thing)


def methods_of(cls: type) -> Iterator[tuple[str, object]]:
    for value in vars(cls).values():
        method = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(method) and method.__module__ == cls.__module__:
            yield f"{cls.__module__}.{method.__qualname__}", method


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def takes_over(name: str, thing: object) -> bool:
    """A method that does what its base class documents needs no words of its own."""
    owner, _, method = name.rpartition(".")
    module, _, cls = owner.rpartition(".")
    where = sys.modules.get(module)
    bases = getattr(getattr(where, cls, None), "__mro__", ())[1:]
    return any(getattr(vars(base).get(method), "__doc__", None) for base in bases)


def check_each(fault: Callable[[object], str | None]) -> list[str]:
    """`fault` of each public thing that has one."""
    found = []
    for name, thing in public_things():
        if is_public(name) and (words := fault(thing)) and not takes_over(name, thing):
            found.append(f"{name}: {words}")
    return sorted(set(found))


def test_every_public_function_and_class_says_what_it_is():
    assert check_each(lambda thing: None if inspect.getdoc(thing) else "no docstring") == []


def test_every_public_function_is_annotated_in_full():
    def missing(thing: object) -> str | None:
        if not inspect.isfunction(thing):
            return None
        signature = inspect.signature(thing)
        bare = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.annotation is inspect.Parameter.empty and name not in ("self", "cls")
        ]
        if signature.return_annotation is inspect.Signature.empty:
            bare.append("return")
        return f"not annotated: {', '.join(bare)}" if bare else None

    assert check_each(missing) == []
