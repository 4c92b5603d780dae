"""What a step does, operation by operation: a log, and why a capture cannot have some of it.

To torch every operation on tensors is a call that a dispatch mode sees: its name, what it was
given, what it made. Two runs of a step can be compared by that, and one can be done again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from spindle.errors import SpindleError


class CaptureError(SpindleError):
    """A step that a capture refuses, or that a graph would replay wrongly."""


class Seen(NamedTuple):
    """A tensor as an operation sees it; its values are nobody's business."""

    memory: str  # "buffer 2" outlives the step, "temporary 2" was made in it; or the buffer's name
    offset: int  # in elements, from where that memory begins
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind} {list(self.shape)} in {self.memory}"


@dataclass(frozen=True)
class Op:
    """One operation. `given` and `made`: its tensors, and all else as Python prints it.

    kind: a "launch" is a kernel at least; a "view" and "memory" send nothing to the device.
    """

    name: str  # "aten.add.Tensor"
    kind: str
    given: tuple[Seen | str, ...]
    made: tuple[Seen | str, ...]
    writes: tuple[str, ...]  # the memory that it changes in place

    def __str__(self) -> str:
        given, made = (", ".join(map(str, part)) for part in (self.given, self.made))
        return f"{self.name}({given}) -> {made}"


class Log(TorchDispatchMode):
    """The operations that run under it, in order: `ops`. Raises CaptureError at one that cannot be.

    With `earlier`, the log of another run, also at the first one that differs from it. Buffers go
    by a number, in order of first appearance, or by the names given here. Operations that torch
    makes of simpler ones are seen as these, in inference mode too.
    """

    def __init__(self, title: str = "the step", earlier: Log | None = None, **names: Tensor):
        super().__init__()
        self.ops: list[Op] = []
        self._title, self._earlier = title, earlier
        self._buffers: _Memory = earlier._buffers if earlier else _Memory("buffer")
        self._temporaries = _Memory("temporary")
        self._unwritten: set[str] = set()  # temporaries that no operation has put anything into
        for name, tensor in names.items():
            self._buffers.add(tensor, name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing of ours is compiled, and to be skipped takes torch's compiler: a second."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **kwargs)
        with self:
            out = func.decompose(*args, **kwargs)
        return self._run(func, args, kwargs) if out is NotImplemented else out

    @property
    def launches(self) -> list[Op]:
        """The operations that send something to the device: what a graph saves Python from."""
        return [op for op in self.ops if op.kind == "launch"]

    @property
    def reads(self) -> set[str]:
        """The buffers whose values the step depends on, in part or whole."""
        given = ((x.memory, op) for op in self.launches for x in op.given if isinstance(x, Seen))
        return {name for name, op in given if name not in op.writes} & self._buffers.names

    @property
    def writes(self) -> set[str]:
        """The buffers that the step changes."""
        return {name for op in self.launches for name in op.writes} & self._buffers.names

    def counts(self) -> Counter[str]:
        """How many launches there are of each operation."""
        return Counter(".".join(op.name.split(".")[:2]) for op in self.launches)

    def table(self) -> str:
        """The counts, the most frequent first, and their sum, as lines of text."""
        counts = self.counts()
        lines = [f"{count:6} {name}" for name, count in counts.most_common()]
        return "\n".join([*lines, f"{counts.total():6} launches"])

    def check_end(self) -> None:
        """CaptureError if the earlier run went on where this one has ended."""
        if self._earlier and len(self.ops) < len(self._earlier.ops):
            missing = self._earlier.ops[len(self.ops)]
            self._fail("the end", f"{missing.name} came here before: Python took another way")

    def forget(self) -> None:
        """Let the temporaries' memory go."""
        self._temporaries = _Memory("temporary")

    def _run(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        refused = _refusal(func, args, kwargs)
        if refused:
            self._fail(str(func), refused)
        given = tuple(self._seen(x) for x in leaves((args, kwargs)))
        writes = tuple(self._memory(x) for x in written(func, args, kwargs))
        out = func(*args, **kwargs)
        made = tensors_of(out)
        for tensor in made:
            if tensor not in self._buffers and tensor not in self._temporaries:
                self._temporaries.add(tensor)
        results = tuple(map(self._seen, made))
        self._note(Op(str(func), _kind(func, given, results), given, results, writes))
        return out

    def _note(self, op: Op) -> None:
        before = self._earlier.ops[len(self.ops) :][:1] if self._earlier else [op]
        if before != [op]:
            why = _difference(before[0], op) if before else "nothing came here before"
            self._fail(op.name, why)
        read = {x.memory for x in op.given if isinstance(x, Seen) and 0 not in x.shape}
        blank = read & self._unwritten - {*op.writes}
        if op.kind == "launch" and blank:
            self._fail(op.name, f"reads {blank.pop()}, which nothing that torch sees has written")
        made = {x.memory for x in op.made if isinstance(x, Seen)}
        if op.kind == "memory":
            self._unwritten |= made
        elif op.kind == "launch":
            self._unwritten -= made | {*op.writes}
        self.ops.append(op)

    def _seen(self, x: object) -> Seen | str:
        if not isinstance(x, Tensor):
            return repr(x)  # 1 is not 1.0 here, and nan is nan
        memory, shape = self._memory(x), tuple(x.shape)
        if x.layout != torch.strided:
            return Seen(memory, 0, shape, (), x.dtype, x.device)
        return Seen(memory, int(x.storage_offset()), shape, x.stride(), x.dtype, x.device)

    def _memory(self, x: Tensor) -> str:
        return self._temporaries.get(x) or self._buffers.get(x) or self._buffers.add(x)

    def _fail(self, name: str, why: str) -> None:
        at = f"{self._title}, operation {len(self.ops)}, {name}"
        raise CaptureError(f"{at}, in {_caller()}: {why}")


class _Memory:
    """Names for the memory of tensors. It is kept, so that no other can come to its address."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._known: dict[int, tuple[str, object]] = {}

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._known.values()}

    def __contains__(self, x: Tensor) -> bool:
        return self.get(x) is not None

    def has(self, key: int) -> bool:
        """Whether the memory that `home_of` calls so is among them."""
        return key in self._known

    def get(self, x: Tensor) -> str | None:
        key, _ = home_of(x)
        return self._known[key][0] if key in self._known else None

    def add(self, x: Tensor, name: str = "") -> str:
        key, home = home_of(x)
        self._known[key] = (name or f"{self._prefix} {len(self._known)}", home)
        return self._known[key][0]


def home_of(x: Tensor) -> tuple[int, Any]:
    """Where a tensor's values are: the same number for all views of it, and what keeps it alive."""
    if x.layout != torch.strided:  # oneDNN's blocks, which have no storage
        return id(x), x
    storage = x.untyped_storage()
    return storage._cdata, storage


# --- what no capture takes -----------------------------------------------------------------------

WATCHERS = ("torch.", *(f"spindle.decode.{name}" for name in ("oplog", "capture", "fake_device")))
INDEXING = ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")
MOVES = ("aten._to_copy", "aten.copy_")
BLANK = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


def _refusal(func: OpOverload, args: tuple, kwargs: dict) -> str:
    """Why a capture cannot have this operation; "" if it can."""
    name = str(func.overloadpacket)
    if torch.Tag.data_dependent_output in func.tags:
        return "Python reads a number from a tensor, and waits for it"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "draws from a generator, whose state is not in a buffer"
    if name in INDEXING:
        if any(x.dtype in (torch.bool, torch.uint8) for x in tensors_of(args[1])):
            return "the shape follows the data: an index by a mask counts what is True"
    elif torch.Tag.dynamic_output_shape in func.tags:
        return "the shape follows the data"
    if name.startswith("aten.lift_fresh"):
        return "brings a number of Python's to the device; fill_ and torch.full would not have to"
    return _mixing(name, args, kwargs)


def _mixing(name: str, args: tuple, kwargs: dict) -> str:
    """Whether values go from one device to another; a number, [], may be a tensor on any."""
    tensors = tensors_of((args, kwargs))
    moves = name in MOVES
    places = {x.device.type for x in tensors if moves or x.ndim > 0}
    if moves and kwargs.get("device") is not None:
        places.add(torch.device(kwargs["device"]).type)
    found = ", ".join(sorted(places))
    return f"brings values from one device to another: {found}" if len(places) > 1 else ""


def _difference(before: Op, now: Op) -> str:
    """What is not as it was, and why a graph would go on as it was."""
    if before.name != now.name:
        return f"{before.name} came here before: Python took another way"
    pairs = zip(before.given + before.made, now.given + now.made, strict=False)
    old, new = next((pair for pair in pairs if pair[0] != pair[1]), ("these arguments", "others"))
    if isinstance(old, str) or isinstance(new, str):
        return f"a number was {old} and is {new}: a graph has the first one baked in"
    if old.shape != new.shape:
        return f"a shape was {list(old.shape)} and is {list(new.shape)}: a graph keeps the first"
    if old.memory != new.memory:
        return f"works on {new.memory}, and did on {old.memory}: a graph keeps the first address"
    return f"a tensor was {old!r} and is {new!r}: a graph keeps the first"


def _kind(func: OpOverload, given: tuple[Seen | str, ...], made: tuple[Seen | str, ...]) -> str:
    if func._schema.name.removeprefix("aten::") in BLANK:
        return "memory"
    inside = {x.memory for x in given if isinstance(x, Seen)}
    aliases = all(isinstance(x, Seen) and x.memory in inside for x in made)
    return "view" if made and aliases and not func._schema.is_mutable else "launch"


def written(func: OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that the operation changes, by its schema."""
    found = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[n] if n < len(args) else kwargs.get(argument.name))
    return tensors_of(found)


def tensors_of(x: object) -> list[Tensor]:
    """The tensors among an operation's arguments or results, however deep in lists, in order."""
    return [part for part in leaves(x) if isinstance(part, Tensor)]


def leaves(x: object) -> Iterator[Any]:
    """Everything that lists, tuples and dicts hold, keys included, one by one."""
    if isinstance(x, dict):
        x = [*x.items()]
    if isinstance(x, list | tuple):
        for part in x:
            yield from leaves(part)
    else:
        yield x


def _caller() -> str:
    """The innermost function that is neither torch's nor one of those that watch."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(WATCHERS):
        frame = frame.f_back
    return frame.f_code.co_qualname
