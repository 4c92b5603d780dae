"""`spindle batch`, killed at random moments, over and over: joined, it is what it would have been.

    python tests/fuzz/batch_kills.py --lines 2000 --kills 10 --seed 0

A file of so many lines is answered once without a kill. Then it is answered into another file by
processes that are killed, each as soon as that file has a number of lines drawn from the seed and a
moment more; the last one is left alone. After each kill: what was there is still there, byte for
byte, only the last line may be half a one, and no custom_id is there twice.

Each process is a fork of one that has imported everything, so that a kill comes while lines are
answered, and not while torch is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from fuzz import kills

WORDS = "a list is the tuple of string set class object module function file name value".split()
MOMENT_S = 0.02  # after the line at which a process is killed, at most


def write_lines(path: Path, count: int, rng: Random) -> None:
    """So many lines, of all kinds that change what is drawn."""
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": words(rng), "max_tokens": rng.randint(1, 24)}
            body |= rng.choice(({}, {"temperature": 0}, {"top_k": 50}, {"seed": number}, {"n": 2}))
            if rng.random() < 0.1:
                body |= {"prompt": [words(rng), words(rng)], "logprobs": 1}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(line | {"body": body}) + "\n")


def words(rng: Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))


def answered(path: Path) -> dict[str, Any]:
    """The results by custom_id, without the time at which they were made. AssertionError: twice."""
    found = {}
    for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last newline is no line
        result = json.loads(line)
        del result["response"]["body"]["created"]
        assert result["custom_id"] not in found, f"{result['custom_id']} was done twice"
        found[result["custom_id"]] = result
    return found


def answer(source: Path, out: Path) -> None:
    """What a process does. AssertionError: it did not end well."""
    from spindle import cli

    assert cli.main(["batch", str(source), str(out), "-m", "tiny", "--quiet"]) == 0


def kill_at(source: Path, out: Path, lines: int, delay_s: float) -> bool:
    """Kill a process a moment after OUT has so many lines; whether that came too late."""
    pid = kills.forked(lambda: answer(source, out))
    deadline = time.monotonic() + kills.LIMIT_S
    while not (out.exists() and out.read_bytes().count(b"\n") >= lines):
        assert time.monotonic() < deadline, f"no {lines} lines after {kills.LIMIT_S:.0f} s"
        time.sleep(0.002)
    return kills.killed_in(pid, delay_s)


def run(lines: int, num_kills: int, seed: int, folder: Path) -> str:
    """All of the above; says what was done. AssertionError: what came of a kill."""
    rng = Random(f"batch {seed}")
    source, whole, out = folder / "in.jsonl", folder / "whole.jsonl", folder / "out.jsonl"
    write_lines(source, lines, rng)
    assert kills.ended(kills.forked(lambda: answer(source, whole))) == 0, "nobody killed it"
    before, late, torn = b"", 0, 0
    for at in sorted(rng.sample(range(lines), num_kills)):
        late += kill_at(source, out, at, rng.random() * MOMENT_S)
        now = out.read_bytes()
        assert now.startswith(before), f"killed at {at} lines: what was there has changed"
        answered(out)
        torn += not now.endswith(b"\n") and now != b""
        before = now[: now.rfind(b"\n") + 1]
    assert kills.ended(kills.forked(lambda: answer(source, out))) == 0, "it does not go on"
    wanted, found = answered(whole), answered(out)
    assert len(wanted) == lines and found.keys() == wanted.keys(), "a line was lost"
    differ = [name for name in wanted if found[name] != wanted[name]]
    assert not differ, f"{len(differ)} lines differ, the first is {differ[0]}"
    return f"{lines} lines, {num_kills} kills, {late} too late, {torn} lines torn: all lines equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import_all()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-batch-") as folder:
        told = run(args.lines, args.kills, args.seed, Path(folder))
    print(f"seed {args.seed}: {told}, {time.monotonic() - begun:.0f} s")
    return 0


def import_all() -> None:
    """What the work imports, so that a fork has it."""
    import spindle.batch.command
    import spindle.batch.work

    assert spindle.batch.command and spindle.batch.work


if __name__ == "__main__":
    sys.exit(main())
