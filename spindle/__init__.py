"""spindle: an LLM inference engine to read."""

from spindle.decode.engine import Engine
from spindle.decode.sampling import SamplingParams
from spindle.errors import SpindleError
from spindle.model.weights import load_hf
from spindle.tokenizer import StreamDecoder, Tokenizer

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "SpindleError", "StreamDecoder", "Tokenizer", "load_hf"]
