"""What the notebooks share: the cast of requests, the package's own source, guesses, checks.

    from spindle.lesson import CAST, check, expect, on_ranks, reveal, source

Nothing here takes part in inference. Everything prints text that is the same on every machine, so
that a notebook's stored output can be compared.
"""

import codecs
import copy
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CAST",
    "CastRequest",
    "Exercise",
    "check",
    "expect",
    "on_ranks",
    "reveal",
    "smallest_lead",
    "source",
]


@dataclass(frozen=True)
class CastRequest:
    """One of the eight requests that play in every chapter, always under one name and colour."""

    name: str
    prompt: str
    max_tokens: int
    colour: str  # "#rrggbb", legible on a light and on a dark page


# Most ask for little and two for much, as users do. The colours are Okabe and Ito's without black
# and yellow ("Color Universal Design", 2008), and two that stay apart from them for every eye.
CAST: tuple[CastRequest, ...] = (
    CastRequest("r0", "The capital of France is", 16, "#0072B2"),
    CastRequest("r1", "Return True if", 8, "#E69F00"),
    CastRequest("r2", "The with statement is used to", 192, "#009E73"),
    CastRequest("r3", "A dictionary is", 24, "#CC79A7"),
    CastRequest("r4", "Raised when", 12, "#873C1E"),
    CastRequest("r5", "The following example shows how to open a file", 96, "#56B4E9"),
    CastRequest("r6", "If the argument is omitted,", 32, "#D55E00"),
    CastRequest("r7", "A function is", 16, "#963CF0"),
)


class _Listing:
    """Source text that a notebook shows as highlighted Python, and a terminal as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        fence = "```"
        while fence in self.text:
            fence += "`"
        return f"{fence}python\n{self.text}\n{fence}"


def source(first: object, *more: object) -> _Listing:
    """The package's own source of functions, methods or classes, to be a cell's last expression.

    The file is named, line numbers are not: they would change with code that is not shown. Where an
    object has no Python source, TypeError says so.
    """
    return _Listing("\n\n".join(_listing(obj) for obj in (first, *more)))


def _listing(obj: Any) -> str:
    if isinstance(obj, property):
        obj = obj.fget
    obj = inspect.unwrap(obj) if callable(obj) else obj
    try:
        text = dedent(inspect.getsource(obj)).rstrip()
        path = Path(inspect.getsourcefile(obj) or "")
    except (TypeError, OSError) as error:
        raise TypeError(f"source: {obj!r} has no Python source to show") from error
    package = Path(__file__).parent
    inside = path.is_relative_to(package)
    return f"# {path.relative_to(package.parent).as_posix()}\n{text}" if inside else text


@contextmanager
def expect(*kinds: type[BaseException]) -> Iterator[None]:
    """Run a block that must raise one of `kinds`; print its type and message.

    AssertionError if nothing is raised, or something else.
    """
    if not kinds:
        raise TypeError("expect: name the exceptions that must come, as in expect(ValueError)")
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds as error:
        print(f"{type(error).__name__}: {error}")
        return
    except Exception as error:
        came = f"{type(error).__name__}: {error}"
        raise AssertionError(f"expected {names}, and {came} came") from error
    raise AssertionError(f"expected {names}, and nothing was raised")


def reveal(guess: object, fact: object, unit: str = "") -> None:
    """Print the guess, then the fact on a line of its own; with their ratio, if both are numbers.

    JupyterLab shows the first line of a folded output: that must not be the fact.
    """
    if guess is None or guess is ...:
        print("no guess yet: write one in the cell above, run it, then this cell again")
        return
    print(f"guess {_said(guess, unit)}")
    ratio = ""
    if _is_number(guess) and _is_number(fact) and fact:
        ratio = f" | guess / fact {float(guess) / float(fact):.2g}"  # type: ignore[arg-type]
    print(f"fact {_said(fact, unit)}{ratio}")


def _is_number(value: object) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool | complex)


def _singular(unit: str) -> str:
    """1 rows is 1 row; but 1 times."""
    first, *rest = unit.split(" ")
    for many, one in {"times": "times", "ches": "ch", "ies": "y", "s": ""}.items():
        if first.isalpha() and len(first) > 2 and first.endswith(many):
            return " ".join([first.removesuffix(many) + one, *rest])
    return unit


def _said(value: object, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{value}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    if value == 1:
        unit = _singular(unit)
    return f"{text} {unit}".rstrip()


def smallest_lead(engine: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The least lead, in logits, of a greedy answer's tokens over their runners-up.

    A text is stored in a notebook only where no choice was close enough for another processor's
    last bits to decide it. Starts the engine's sequence over.
    """
    logits, lead = engine.prefill(prompt), math.inf
    for token in answer:
        first, second = logits[0].topk(2).values.tolist()
        lead = min(lead, first - second)
        logits = engine.extend([token])
    return lead


# --- several processes -------------------------------------------------------------------------

_ONE_RANK = """
import json, sys
from spindle import parallel

rank, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def join(name):
    url = "file://%s/%s?rank=%d&world_size=%d" % (folder, name, rank, count)
    return parallel.init(url, timeout_s=120)


found = {}(join)
with open(folder + "/%d.json" % rank, "w") as file:
    json.dump(found, file)
"""


def on_ranks(count: int, work: Callable[..., Any], *helpers: Callable[..., Any]) -> list[Any]:
    """What `work(join)` returns in each of `count` processes of this machine, by rank.

    A process gets the source of these functions and nothing else, so they import what they need;
    what is returned has to be JSON's. `join(name)` is `parallel.init()` for one meeting of all of
    them. RuntimeError, with what they have written: some of them failed.
    """
    text = "\n\n".join(dedent(inspect.getsource(one)) for one in (*helpers, work))
    env = os.environ | {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(count)}
    with TemporaryDirectory() as folder:
        script = Path(folder, "one_rank.py")
        script.write_text(f"{text}{_ONE_RANK.format(work.__name__)}", encoding="utf-8")
        argv = [[sys.executable, str(script), str(n), str(count), folder] for n in range(count)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [subprocess.Popen(one, env=env, **pipes) for one in argv]  # type: ignore[call-overload]
        try:
            said = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        failed = [words for rank, words in zip(ranks, said, strict=True) if rank.returncode]
        if failed:  # often those who waited for the one whose fault it is, too
            words = "\n".join(failed)
            raise RuntimeError(f"{len(failed)} of {count} ranks failed:\n{words}")
        return [json.loads(Path(folder, f"{n}.json").read_text()) for n in range(count)]


# --- exercises ---------------------------------------------------------------------------------


class Exercise:
    """A task that a reader's function is held against: the right function, and inputs to try.

    `right` is the specification, and its docstring is what the reader is told. Calling the exercise
    prints `not yet: ...` with the first input that goes wrong, or `yes: ...`.
    """

    def __init__(self, right: Callable[..., Any], chapter: str, inputs: Sequence[tuple]) -> None:
        self.right, self.chapter, self.inputs = right, chapter, inputs
        self.name = right.__name__
        self.__doc__ = right.__doc__

    def __call__(self, answer: Callable[..., Any]) -> None:
        for n, args in enumerate(self.inputs):
            if wrong := self._wrong(answer, args, first=n == 0):
                print(f"not yet: {wrong}")
                return
        tried = f"{len(self.inputs)} of {len(self.inputs)} inputs"
        print(f"yes: {self._name_of(answer)} is right on {tried}")

    def _name_of(self, answer: Callable[..., Any]) -> str:
        """What the reader calls it, unless it has no name."""
        name = getattr(answer, "__name__", "")
        return name if name.isidentifier() else self.name

    def _wrong(self, answer: Callable[..., Any], args: tuple, first: bool) -> str:
        """Why this input goes wrong; only on the `first` may a tensor of NaN be an empty stub's."""
        name = self._name_of(answer)
        call = f"{name}({', '.join(_argument(arg) for arg in args)})"
        want = self.right(*_copies(args))
        try:
            got = answer(*_copies(args))
        except NotImplementedError:
            got = None
        except Exception as error:
            return f"{call} raised {type(error).__name__}: {error}"
        if got is None or got is ... or (first and _is_unwritten(got)):
            return f"{name} returns nothing so far; it should return {self._task()}"
        difference = _difference(got, want)
        return f"{call} {difference}" if difference else ""

    def _task(self) -> str:
        return (self.right.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _copies(args: tuple) -> list[Any]:
    return copy.deepcopy(list(args))  # an answer may change what it is given


def _is_unwritten(got: object) -> bool:
    """Whether it is a tensor that has the NaN of its making everywhere."""
    if not isinstance(got, Tensor) or not got.is_floating_point() or not got.numel():
        return False
    return bool(got.isnan().all())


def _argument(arg: object) -> str:
    """As it would be typed; of a large tensor the shape."""
    if not isinstance(arg, Tensor):
        return repr(arg)
    if arg.dim() != 1 or len(arg) > 8:
        return f"a tensor {list(arg.shape)}"
    return f"tensor([{', '.join(f'{number:.4g}' for number in arg.tolist())}])"


def _difference(got: Any, want: Any) -> str:
    """How `got` differs from `want`, in words; empty if it does not."""
    if isinstance(want, str):
        return "" if got == want else f"should be {want!r}, not {got!r}"
    if not isinstance(want, Tensor):
        same = _is_number(got) and math.isclose(got, want, rel_tol=1e-9)
        return "" if same else f"should be {_said(want, '')}, not {_said(got, '')}"
    if not isinstance(got, Tensor):
        return f"should be a tensor {list(want.shape)}, not {type(got).__name__}"
    if got.shape != want.shape:
        return f"should have shape {list(want.shape)}, not {list(got.shape)}"
    if got.dtype != want.dtype:
        return f"should be {want.dtype}, not {got.dtype}"
    close = (
        torch.isclose(got, want, rtol=1e-4, atol=1e-5) if want.is_floating_point() else got == want
    )
    if bool(close.all()):
        return ""
    place = [int(i) for i in (~close).nonzero()[0]]
    at = tuple(place)
    return f"should be {want[at].item():.4g} at {place}, not {got[at].item():.4g}"


class Checks:
    """The exercises by name: `check.causal_mask(f)`."""

    def __init__(self) -> None:
        self._exercises: dict[str, Exercise] = {}

    def exercise(
        self, chapter: str, inputs: Sequence[tuple]
    ) -> Callable[[Callable[..., Any]], Exercise]:
        """Register the decorated function as the right answer to an exercise of `chapter`."""

        def register(right: Callable[..., Any]) -> Exercise:
            assert right.__name__ not in self._exercises, right.__name__
            made = Exercise(right, chapter, inputs)
            self._exercises[right.__name__] = made
            return made

        return register

    def __getattr__(self, name: str) -> Exercise:
        known = self.__dict__.get("_exercises", {})
        if name not in known:
            raise AttributeError(f"no exercise {name!r}; there are {', '.join(sorted(known))}")
        return known[name]

    def __dir__(self) -> list[str]:
        return sorted(self._exercises)


check = Checks()


@check.exercise(
    "00",
    inputs=[
        (b"plain",),
        (b"Z\xc3\xbcr",),
        (b"Z\xc3",),
        (b"\xe2\x86",),
        (b"a\xf0\x9f\x98",),
        (b"a\xef\xbf\xbd",),
        (b"a\xffb",),
        (b"",),
    ],
)
def whole_characters(data: bytes) -> str:
    """str, the text at the start that no later byte can change; � for what none can save."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _qkv(queries: int, keys: int, head_dim: int, start: int) -> tuple:
    draw = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(queries, head_dim), (keys, head_dim), (keys, head_dim)]
    return *(torch.randn(shape, generator=draw) for shape in shapes), start


@check.exercise("01", inputs=[(1, 1, 0), (4, 4, 0), (1, 6, 5), (3, 5, 2), (2, 8, 3)])
def causal_mask(T: int, S: int, start: int) -> Tensor:
    """bool [T, S], True where query t, at position start + t, may see key j."""
    return torch.arange(S) <= start + torch.arange(T)[:, None]


@check.exercise(
    "01", inputs=[_qkv(1, 1, 4, 0), _qkv(5, 5, 8, 0), _qkv(1, 7, 4, 6), _qkv(3, 9, 16, 4)]
)
def attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """float [T, D], each query's softmax-weighted mean of the values that it may see."""
    scores = q @ k.T / math.sqrt(q.shape[-1])  # [T, S]
    hidden = ~causal_mask.right(q.shape[0], k.shape[0], start)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v  # [T, D]


@check.exercise("04", inputs=[(1, 1, 1, 1, 1), (512, 12, 12, 64, 2), (79, 30, 3, 64, 4)])
def cache_bytes(
    tokens: int, layers: int, kv_heads: int, head_dim: int, bytes_per_number: int
) -> int:
    """int, the bytes that a KV cache of `tokens` positions holds."""
    return 2 * tokens * layers * kv_heads * head_dim * bytes_per_number


@check.exercise(
    "04", inputs=[(16, 64, False), (16, 64, True), (1, 1, True), (5, 1, False), (7, 3, True)]
)
def rows_computed(prompt: int, new: int, cached: bool) -> int:
    """int, the token rows that pass through the model until `new` tokens are generated."""
    # The last new token is never fed back.
    return prompt + new - 1 if cached else sum(range(prompt, prompt + new))


@check.exercise("02", inputs=[(1e5, 64, 31), (1e5, 64, 0), (5e5, 128, 63), (1e4, 32, 8)])
def wavelength(theta: float, head_dim: int, pair: int) -> float:
    """float, the places after which pair `pair` of a head, counted from 0, has turned once."""
    return 2 * math.pi * theta ** (2 * pair / head_dim)


def _numbered(heads: int, head_dim: int, width: int) -> Tensor:
    """[heads * head_dim, width], every number another."""
    return torch.arange(heads * head_dim * width).float().view(-1, width)


@check.exercise("02", inputs=[(_numbered(1, 8, 1), 1), (_numbered(3, 8, 2), 3)])
def halves_from_pairs(rows: Tensor, heads: int) -> Tensor:
    """float [heads * D, E], in each head first the even rows (0, 2, 4), then the odd ones."""
    pairs = rows.view(heads, -1, 2, rows.shape[1])  # [heads, D/2, 2, E]
    return pairs.transpose(1, 2).reshape(rows.shape)


_EIGHTHS = [torch.tensor(row) / 8 for row in ([4.0, 2, 1, 1], [1.0, 4, 1, 2], [0, 2, 2, 4])]


@check.exercise(
    "03",
    inputs=[(_EIGHTHS[0], 0.75), (_EIGHTHS[0], 0.76), (_EIGHTHS[0], 0.1), (_EIGHTHS[0], 1.0),
            (_EIGHTHS[1], 0.7), (_EIGHTHS[1], 0.8), (_EIGHTHS[2], 0.6)],
)  # fmt: skip
def nucleus(p: Tensor, top_p: float) -> Tensor:
    """float [V], the fewest likeliest tokens that hold top_p, lower ids first, made to sum to 1."""
    sorted_p, order = p.sort(descending=True, stable=True)
    held = torch.cat([torch.zeros(1), sorted_p.cumsum(0)[:-1]])  # by the likelier ones
    kept = sorted_p.where(held < top_p, 0.0)
    return torch.zeros_like(p).scatter(0, order, kept / kept.sum())


_LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.5, 3.0, -1.0])


@check.exercise(
    "03",
    inputs=[
        (_LOGITS, 1.0, 6, 1.0, 0.0, 0.5),
        (_LOGITS, 1.0, 6, 1.0, 0.0, 0.0),
        (_LOGITS, 1.0, 6, 1.0, 0.0, 0.999),
        (_LOGITS, 2.0, 6, 0.7, 0.0, 0.7),  # heat comes before the cut
        (_LOGITS, 1.0, 1, 1.0, 0.0, 0.9),  # of equal ones the lower id
        (torch.zeros(4), 1.0, 4, 1.0, 0.0, 0.5),  # exceeds, and not reaches
        (_LOGITS, 1.0, 3, 0.75, 0.0, 0.45),  # top-p asks for a share of what top-k has left
        (_LOGITS, 1.0, 6, 0.99, 0.5, 0.97),  # and of what min-p has
        (_LOGITS, 3.0, 6, 1.0, 0.5, 0.1),  # min-p, too, after the temperature
        (100 * _LOGITS, 0.1, 6, 1.0, 0.0, 0.3),  # exp(3000) is too large for any float
    ],
)
def choose(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """int, the id: temperature, then min-p, top-k, top-p, lower ids first; then the walk to u."""
    p = ((z - z.max()).double() / temperature).softmax(0)  # [V]
    p = p.where(p >= min_p * p.max(), 0)
    p[p.argsort(descending=True, stable=True)[top_k:]] = 0
    p = nucleus.right(p / p.sum(), top_p)
    return int((p.cumsum(0) > u).nonzero()[0])


@check.exercise("05", inputs=[(3, 2, 0, 4), (3, 2, 4, 1), (3, 0, 4, 2), (1, 0, 7, 1), (5, 2, 9, 3)])
def visible_keys(layers: int, moves_in: int, stored: int, count: int) -> Tensor:
    """int64 [layers], the keys each layer sees in a step of `count` tokens on top of `stored`."""
    has_moved = torch.arange(layers) >= moves_in  # append comes before gather, in that layer too
    return stored + count * has_moved


@check.exercise(
    "06",
    inputs=[
        (1, 0, 134_515_008, 11_520, 4),
        (8, 0, 100, 3, 2),
        (1, 5, 100, 3, 2),
        (8, 5, 100, 3, 2),
    ],
)
def fetched_bytes(rows: int, keys: int, weights: int, kv_numbers: int, number_bytes: int) -> int:
    """int, the bytes a pass fetches: weights once, and for each row its own keys and values."""
    return (weights + rows * keys * kv_numbers) * number_bytes


@check.exercise("06", inputs=[(4, 29e9, 140e9), (2, 29e9, 140e9), (2, 4.8e12, 989e12)])
def knee_rows(number_bytes: int, bytes_per_s: float, flops_per_s: float) -> float:
    """float, the rows at which fetching the weights and multiplying take equal time."""
    return number_bytes / 2 * flops_per_s / bytes_per_s


@check.exercise(
    "07", inputs=[(0, 5, 4), (4, 1, 4), (5, 3, 4), (5, 4, 4), (0, 16, 16), (31, 34, 16)]
)
def blocks_needed(stored: int, new: int, block_size: int) -> int:
    """int, the blocks to take when `new` tokens come to `stored` ones."""
    return -(-(stored + new) // block_size) - -(-stored // block_size)


@check.exercise(
    "07",
    inputs=[(0, 4, (5, 2), 4), (3, 3, (5, 2, 7), 4), (16, 1, (9, 0), 16), (0, 3, (8, 1, 4), 1)],
)
def slots_of(start: int, count: int, table: Sequence[int], block_size: int) -> Tensor:
    """int64 [count], the slots of `count` positions from `start` on."""
    position = torch.arange(start, start + count)
    return torch.tensor(table)[position // block_size] * block_size + position % block_size


@check.exercise(
    "08",
    inputs=[(16, 4, 0, 16), (13, 4, 0, 16), (13, 4, 1, 16), (16, 4, 1, 16), (500, 8, 192, 16)],
)
def branch_blocks(prompt: int, answers: int, new: int, block_size: int) -> int:
    """int, the blocks that all answers to one prompt hold once each has `new` tokens stored."""
    if new == 0:
        return -(-prompt // block_size)
    shared = prompt // block_size  # a block that was not full is written to, by each in its own
    return shared + answers * (-(-(prompt + new) // block_size) - shared)


_TWICE = list(range(100, 116))


@check.exercise(
    "08",
    inputs=[(_TWICE, [], 4), (_TWICE, _TWICE[:10], 4), (_TWICE, _TWICE, 4), (_TWICE, _TWICE, 16),
            ([*_TWICE, 7], _TWICE, 16), ([7, *_TWICE[1:]], _TWICE, 4),
            ([*_TWICE[:5], 7, *_TWICE[6:]], _TWICE, 4)],
)  # fmt: skip
def rows_after_hit(prompt: list[int], remembered: list[int], block_size: int) -> int:
    """int, the rows of `prompt` to compute where the full blocks of `remembered` are known."""
    found = 0
    for stop in range(block_size, min(len(prompt) - 1, len(remembered)) + 1, block_size):
        if prompt[:stop] == remembered[:stop]:
            found = stop
    return len(prompt) - found


@check.exercise(
    "11",
    inputs=[([(5, 16)], 4), ([(5, 16), (3, 8), (6, 32)], 4), ([(5, 1), (4, 1), (9, 2)], 4),
            ([(10, 96), (6, 192), (2, 12)], 16), ([(7, 3)], 1)],
)  # fmt: skip
def peak_blocks(requests: Sequence[tuple[int, int]], block_size: int) -> int:
    """int, the most blocks held in any step by requests (prompt, new) that begin together."""
    # In the step that gives its last token a request still holds its blocks; after it, none.
    last = max(new for _, new in requests)
    return max(
        sum(-(-(prompt + step) // block_size) for prompt, new in requests if step < new)
        for step in range(last)
    )


@check.exercise(
    "11",
    inputs=[((5, 3), 1, 0, 1), ((22, 23, 22, 23), 0, 0, 1), ((22, 23, 22, 23), 0, 3, 1),
            ((5, 1, 1, 1), 0, 0, 3), ((5, 1, 1, 1), 1, 0, 3), ((4, 2, 1), 0, 1, 5),
            ((5, 2, 4), 0, 0, 3)],
)  # fmt: skip
def preemptions(held: Sequence[int], free: int, asks: int, wants: int) -> int:
    """int, how many are preempted, the last first, until number `asks` has `wants` blocks more."""
    gone = 0
    while free < wants:
        gone += 1
        free += held[-gone]
        if gone == len(held) - asks:  # it was its own turn
            break
    return gone


@check.exercise(
    "10",
    inputs=[
        ((0, 10, 20), (1, 1, 1)),
        (tuple(range(0, 100, 10)), (1, 1, 50, 1, 1, 1, 1, 1, 1, 1)),
        ((0, 1, 2, 3), (4, 4, 4, 4)),
        ((5, 6, 90), (10, 2, 3)),
    ],
)
def longest_wait(due: Sequence[int], takes: Sequence[int]) -> int:
    """int, the longest time from due to done of requests that one seat serves in turn."""
    now = longest = 0
    for when, time in zip(due, takes, strict=True):
        now = max(now, when) + time
        longest = max(longest, now - when)
    return longest


@check.exercise(
    "10",
    inputs=[
        (400, 0, 512, 10),
        (400, 8, 512, 10),
        (400, 8, 64, 10),
        (400, 8, 16, 10),
        (5, 2, 4, 10),
        (1, 0, 16, 4),
        (9, 0, 8, 4),
        (70, 0, 64, 10),
    ],
)
def prompt_ticks(prompt: int, decodes: int, budget: int, knee: int) -> float:
    """float, the ticks until a prompt is through beside decodes; T rows take max(1, T / knee)."""
    ticks = 0.0
    while prompt:
        chunk = min(prompt, budget - decodes)
        ticks += max(1, (decodes + chunk) / knee)
        prompt -= chunk
    return ticks


_LENGTHS = (63, 5, 10, 6, 24, 16, 62, 4, 192)


@check.exercise(
    "09", inputs=[((16, 8, 192, 24), 4), (_LENGTHS, 4), (_LENGTHS, 1), ((3, 9, 2), 8), ((7, 7), 2)]
)
def static_steps(lengths: Sequence[int], seats: int) -> int:
    """int, the steps in which static batches, in the order given, make answers of such lengths."""
    return sum(max(lengths[at : at + seats]) for at in range(0, len(lengths), seats))


@check.exercise(
    "09",
    inputs=[((16, 8, 192, 24), 4), (_LENGTHS, 4), (_LENGTHS[::-1], 4), (_LENGTHS, 1),
            ((3, 9, 2), 8), ((2, 2, 2, 3, 3, 4), 3), ((7, 7, 7), 2)],
)  # fmt: skip
def continuous_steps(lengths: Sequence[int], seats: int) -> int:
    """int, the steps if whoever is next, in the order given, takes a seat once it is free."""
    free_at = [0] * seats
    for length in lengths:
        free_at[free_at.index(min(free_at))] += length
    return max(free_at)


_NEIGHBOURS = [(t, did, w, 0) for t in range(4) for did, w in (("wrote", t), ("read", t ^ 1))]


@check.exercise(
    "C",
    inputs=[
        (_NEIGHBOURS,),
        ([(t, did, w, did == "read") for t, did, w, _ in _NEIGHBOURS],),
        ([(0, "read", 5, 0), (1, "read", 5, 0), (2, "wrote", 6, 0), (1, "wrote", 5, 0)],),
        ([(0, "wrote", 5, 0), (0, "read", 5, 0), (0, "wrote", 5, 0), (1, "read", 6, 0)],),
        ([(0, "wrote", 5, 0), (0, "read", 5, 0), (1, "read", 5, 0)],),
        ([(0, "read", 5, 0), (1, "wrote", 5, 1), (0, "wrote", 5, 2), (1, "wrote", 5, 2)],),
        ([],),
    ],
)
def first_race(log: Sequence[tuple[int, str, int, int]]) -> int:
    """int, the place of the first access that races with one before it; len(log): none does."""

    def races(one: tuple[int, str, int, int], other: tuple[int, str, int, int]) -> bool:
        return one[2:] == other[2:] and one[0] != other[0] and "wrote" in (one[1], other[1])

    clashes = (at for at, one in enumerate(log) for other in log[:at] if races(one, other))
    return next(clashes, len(log))


def _whole_numbers(seed: int) -> Tensor:
    """[300], small, so that sums in float32 are exact in any order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (300,), generator=draw).float()


@check.exercise("C", inputs=[(torch.ones(300),), (_whole_numbers(1),), (_whole_numbers(2),)])
def running_sums(x: Tensor) -> Tensor:
    """float [300], each element the sum of all up to itself."""
    return x.cumsum(0)


@check.exercise(
    "14",
    inputs=[
        (torch.tensor([2]), 1, 6),
        (torch.tensor([0, 3, 5]), 1, 6),
        (torch.tensor([2]), 3, 6),
        (torch.tensor([1, 4]), 2, 8),
    ],
)
def slot_mask(seq_lens: Tensor, count: int, capacity: int) -> Tensor:
    """bool [R, C, S], True where new token c of a row may not look: at slots beyond its own."""
    own = seq_lens[:, None] + torch.arange(count)  # [R, C]
    return torch.arange(capacity) > own[:, :, None]


@check.exercise(
    "14", inputs=[((5,), 8), ((8, 4, 2, 1), 8), ((5, 5, 3), 8), ((9, 7), 12), ((3,), 3), ((6,), 6)]
)
def rows_of_nobody(batches: Sequence[int], most: int) -> int:
    """int, the padding rows of steps of so many rows, in buckets 1, 2, 4, ... and `most`."""
    return sum(min(1 << (rows - 1).bit_length(), most) - rows for rows in batches)


def _scored(scores: list[float], head_dim: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(len(scores))
    return torch.tensor(scores), torch.randn(len(scores), head_dim, generator=draw)


@check.exercise(
    "13",
    inputs=[
        _scored([0.5]),
        _scored([1.0, -2.0, 3.0, 0.0, 3.5]),
        _scored([400.0, 402.0, 399.0]),
        _scored([-400.0, -401.0]),
        _scored([-math.inf, 1.0, -math.inf, 2.0]),
        _scored([-math.inf, -math.inf]),
        _scored([]),
    ],
)
def one_pass_attention(scores: Tensor, values: Tensor) -> Tensor:
    """float [D], the softmax-weighted mean of values [S, D]; zeros if every score [S] is -inf."""
    if not (scores > -math.inf).any():
        return values.new_zeros(values.shape[1])
    return scores.softmax(0) @ values


def _rows(count: int, width: int, scale: float) -> Tensor:
    draw = torch.Generator().manual_seed(width)
    return scale * torch.randn(count, width, generator=draw)


@check.exercise(
    "13", inputs=[(_rows(1, 1, 1),), (_rows(2, 256, 1),), (_rows(3, 300, 2),), (_rows(2, 700, 99),)]
)
def row_softmax(x: Tensor) -> Tensor:
    """float [T, S], the softmax of each row."""
    return x.softmax(-1)


_LAYER = [  # (bytes, first call, last call): of two layers, as a recorded step has them
    (span[0], span[1] + 11 * layer, span[2] + 11 * layer)
    for layer in range(2)
    for span in ((2304, 7, 8), (3840, 8, 12), (2304, 12, 13), (2304, 13, 14), (2304, 14, 15),
                 (12288, 15, 16), (6144, 16, 17), (2304, 17, 18))
]  # fmt: skip


@check.exercise(
    "12",
    inputs=[
        ([(8, 0, 1)],),
        ([(8, 0, 1), (8, 1, 2), (8, 2, 3)],),
        ([(2, 0, 1), (4, 1, 2), (4, 2, 3), (6, 3, 4)],),
        ([(4, 0, 3), (8, 1, 2), (4, 4, 5), (2, 2, 5)],),
        ([(4, 1, 3), (6, 2, 2), (4, 3, 6), (4, 3, 6)],),
        ([(4, 0, 1), (6, 2, 3), (2, 0, 3), (4, 1, 2)],),
        (_LAYER,),
        ([],),
    ],
)
def largest_first(spans: Sequence[tuple[int, int, int]]) -> int:
    """int, the bytes of a plan of spans (bytes, first call, last call), largest placed first."""
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first call, last call
    for nbytes, first, last in sorted(spans, key=lambda span: -span[0]):
        offset = 0
        for start, end, its_first, its_last in sorted(placed):
            if its_first <= last and first <= its_last and offset + nbytes > start:
                offset = max(offset, end)
        placed.append((offset, offset + nbytes, first, last))
    return max((end for _, end, _, _ in placed), default=0)


@check.exercise(
    "12",
    inputs=[(1, 32, 4, 32, 2), (576, 1536, 4, 32, 2), (4, 33, 4, 32, 2), (3, 10, 8, 10, 4)],
)
def grouped_bytes(outputs: int, inputs: int, bits: int, group: int, scale_bytes: int) -> int:
    """int, the bytes; each row begins with a byte and a group of its own, a group has a scale."""
    return outputs * (-(-inputs * bits // 8) + -(-inputs // group) * scale_bytes)


_OFFERED = [
    torch.tensor(row, dtype=torch.float64) / 20 for row in ([12, 3, 2, 2, 1], [0, 2, 0, 0, 18])
]


@check.exercise(
    "15",
    inputs=[
        (*_OFFERED, 4, 0.05, 0.99),  # 1 / 18 is just enough
        (*_OFFERED, 1, 0.99, 0.0),
        (*_OFFERED, 4, 0.06, 0.0),
        (*_OFFERED, 4, 0.5, 0.7),  # of 17 missing 12 come first: up to 0.706
        (*_OFFERED, 4, 0.5, 0.72),
        (*_OFFERED, 4, 0.5, 0.99),
        (*_OFFERED[::-1], 0, 0.0, 0.3),
        (*_OFFERED[::-1], 2, 0.0, 0.98),
        (*_OFFERED[::-1], 1, 0.7, 0.5),
        (*_OFFERED[::-1], 1, 0.6, 0.5),
    ],
)
def judged_token(p: Tensor, q: Tensor, draft: int, u_accept: float, u: float) -> int:
    """int, the draft if u_accept accepts it, else the token at u in the residual of p and q."""
    if u_accept * q[draft] < p[draft]:
        return draft
    missing = (p - q).clamp(min=0).cumsum(0)
    return int((missing > u * missing[-1]).nonzero()[0])


@check.exercise(
    "15",
    inputs=[
        (10, (7, 8, 9), (7, 8, 9, 4)),
        (10, (7, 8, 9), (5, 6, 3, 4)),
        (10, (7, 8, 9), (7, 8, 2, 4)),
        (10, (7, 8, 9), (7, 5, 9, 4)),
        (4, (), (3,)),
        (0, (3, 3), (3, 3, 3)),
    ],
)
def tokens_kept(stored: int, guesses: Sequence[int], said: Sequence[int]) -> int:
    """int, the tokens in the cache after a round that found `stored` ones there."""
    agree = [guess == token for guess, token in zip(guesses, said, strict=False)]
    return stored + 1 + [*agree, False].index(False)


_DRAFTED = [5, 1, 8, 2, 9, 4, 7]  # a text of three tokens, and four drafts, all in the cache


@check.exercise(
    "16",
    inputs=[
        (_DRAFTED, [5, 1, 8, 2, 9, 4, 7]),
        (_DRAFTED, [5, 1, 8, 2, 9, 4, 7, 3]),
        (_DRAFTED, [5, 1, 8, 2, 9, 4, 6]),
        (_DRAFTED, [5, 1, 8, 2, 9, 6]),
        (_DRAFTED, [5, 1, 8, 2, 6]),
        (_DRAFTED, [5, 1, 8, 6]),
        ([], [5, 1, 8]),
        ([5, 1, 8], [5, 1, 8, 2, 9]),
        (_DRAFTED, [5, 1, 8, 6, 9, 4, 7, 3]),
        (_DRAFTED, [5, 1]),
    ],
)
def resync(stored: list[int], text: list[int]) -> int:
    """int, how many stored tokens to keep so that the fewest of the text are run, the last too."""
    most = min(len(stored), len(text) - 1)
    return next((n for n in range(most) if stored[n] != text[n]), most)


_FLAT, _STEEP = (None, *[1.0] * 9), (None, *[max(1.0, 0.4 * n) for n in range(1, 10)])
_DEAR = (None, 1.0, 1.06, 1.12, 1.18, 1.24, 1.3)


@check.exercise(
    "17",
    inputs=[
        (0.9, _DEAR, 0.0),
        (0.3, _DEAR, 0.0),
        (0.3, _DEAR, 0.25),
        (0.7, _DEAR, 0.25),
        (0.7, _FLAT, 0.0),
        (0.7, _STEEP, 0.0),
        (0.0, _FLAT, 0.0),
        (1.0, _STEEP, 0.3),
        (0.5, (None, 1.0), 0.1),
    ],
)
def drafts_that_pay(a: float, v: Sequence[float | None], c: float) -> int:
    """int, the k with the most tokens for their price; v[n] is what n rows cost, c a draft."""

    def gain(k: int) -> float:
        price = v[k + 1]
        assert price is not None
        return sum(a**i for i in range(k + 1)) / (price + k * c)

    return max(range(len(v) - 1), key=gain)  # of equals the first


@check.exercise("17", inputs=[(10, 3, 5), (206, 3, 5), (10, 1.7, 1), (9.7, 5.5, 5), (10, 1, 5)])
def users_that_gain(knee: float, tokens: float, k: int) -> float:
    """float, the users up to whom k drafts each, which make `tokens` tokens, are no loss."""
    return knee * tokens / (k + 1)


@check.exercise(
    "18",
    inputs=[
        ([1, 1, 1], 3, 4, 10),
        ([5, 1, 1, 1], 8, 4, 10),
        ([5, 6, 6, 6], 14, 4, 10),
        ([64, 64, 16], 144, 4, 10),
        ([64, 8, 1], 60, 4, 10),
        ([1, 2, 8], 9, 1, 10),
        ([1, 40, 206], 247, 2, 412),
    ],
)
def wanted_share(passes: Sequence[int], wanted: int, number_bytes: int, knee: float) -> float:
    """float, `wanted` over all places of passes of so many rows, with weights of so many bytes."""
    return wanted / sum(max(rows, knee * number_bytes / 4) for rows in passes)


@check.exercise(
    "18",
    inputs=[(3, 10, 0), (3, 10, 2), (3, 10, 5), (1, 10, 0), (1, 10, 5), (2.5, 206, 3), (0.5, 9, 1)],
)
def most_seats(gap_ticks: float, knee: float, k: int) -> int:
    """int, the most users whose steps, with k drafts each, take `gap_ticks` ticks or less."""
    return int(gap_ticks * knee // (k + 1)) if gap_ticks >= 1 else 0


@check.exercise(
    "B",
    inputs=[
        ([2.0, 1.5], [3, 0], 2048),
        ([1.5, 2.0], [3, 0], 2048),
        ([1.0, 1.0, 4.0], [0, 9, 16_383], 16_384),
        ([-3.0, -1.0, -2.0], [5, 7, 1], 16_384),
        ([2.5, 2.5, 2.5], [8, 0, 1], 16),
        ([1.0, 2.5, 2.5], [0, 9, 1], 16),
    ],
)
def likeliest_of_parts(best: Sequence[float], ids: Sequence[int], part: int) -> int:
    """int, the id of the largest logit, the first of equals, if a rank has `part` of the ids."""
    rank = max(range(len(best)), key=lambda n: best[n])  # of equals the first
    return rank * part + ids[rank]


@check.exercise("B", inputs=[(18_600, 30, 3), (18_600, 30, 2), (29_000, 80, 8), (1000, 6, 2)])
def longest_hop_us(pass_us: float, layers: int, ranks: int) -> float:
    """float, the time of a hop at which a pass cut into so many parts takes as long as before."""
    hops = (1 + 2 * layers) * 2 * (ranks - 1) + 2 * (ranks - 1)
    return pass_us * (ranks - 1) / ranks / hops


@check.exercise(
    "A", inputs=[(8, 48, 30), (8, 48, 60), (1, 10, 60), (1, 10, 9), (4, 7, 100), (64, 200, 50)]
)
def queue_limit(seats: int, tokens: int, patience: int) -> int:
    """int, the most who may wait so that the last has a seat within `patience` steps on average."""
    return patience * seats // tokens


_EDGES = (0.0, 0.5, 1.0, 2.5)


@check.exercise(
    "A",
    inputs=[
        (_EDGES, (100, 0, 0), 50),
        (_EDGES, (98, 0, 2), 99),
        (_EDGES, (60, 30, 10), 95),
        (_EDGES, (60, 30, 10), 75),
        (_EDGES, (0, 0, 7), 99),
        (_EDGES, (50, 50, 0), 50),
        ((0.0, 1.0, 2.0, 4.0, 8.0), (1, 0, 2, 1), 100),
    ],
)
def binned_percentile(edges: Sequence[float], counts: Sequence[int], p: float) -> float:
    """float, the value that p percent do not exceed, where counts[n] lie evenly in their bin."""
    rank, at = sum(counts) * p / 100, 0
    while rank > counts[at]:
        rank -= counts[at]
        at += 1
    low, high = edges[at : at + 2]
    return low + (high - low) * rank / counts[at]
