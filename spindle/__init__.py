"""spindle: an LLM inference engine to read.

The public names are found when they are first used: `spindle --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from spindle.errors import SpindleError

if TYPE_CHECKING:  # the same names, where type checkers and editors look for them
    from spindle.decode import graphs, speculative
    from spindle.decode.engine import Engine
    from spindle.decode.sampling import SamplingParams
    from spindle.model.weights import load_hf
    from spindle.serve.llm import LLM
    from spindle.tokenizer import StreamDecoder, Tokenizer

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Engine",
    "SamplingParams",
    "SpindleError",
    "StreamDecoder",
    "Tokenizer",
    "graphs",
    "load_hf",
    "speculative",
]

_HOMES = {
    "LLM": "spindle.serve.llm",
    "Engine": "spindle.decode.engine",
    "SamplingParams": "spindle.decode.sampling",
    "StreamDecoder": "spindle.tokenizer",
    "Tokenizer": "spindle.tokenizer",
    "graphs": "spindle.decode.graphs",
    "load_hf": "spindle.model.weights",
    "speculative": "spindle.decode.speculative",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spindle' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if home.__name__.endswith(f".{name}") else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
