"""What the command lines of this folder have in common: seeds, and kinds by turns."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm import tqdm

Told = dict[str, Any]  # what is known of a case that was run


def asked(about: str, kinds: Iterable[str], count: int) -> argparse.Namespace:
    """The options; `single`: one case again, of which more is told. child: None, or what it is."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seed", type=int, help="the first seed (default: 0)")
    how_many = f"how many seeds (default: 1 with --seed, else {count})"
    parser.add_argument("--count", type=int, help=how_many)
    parser.add_argument("--only", choices=list(kinds), help="one kind")
    parser.add_argument("--child", nargs="?", const="", help=argparse.SUPPRESS)
    args = parser.parse_args(sys.argv[1:])
    args.single = args.count is None and args.seed is not None
    args.count = args.count or (1 if args.single else count)
    args.seed = args.seed or 0
    return args


def by_turns(
    kinds: Iterable[str], seed: int, count: int, only: str | None = None
) -> list[tuple[str, int]]:
    """(kind, seed): every kind has the seeds of its turns."""
    names = list(kinds)
    return [(only or names[s % len(names)], s) for s in range(seed, seed + count)]


def heard(
    cases: Iterable[Told], findings: list[Told], bar: tqdm, words: Callable[[Told], str], all_: bool
) -> Iterator[Told]:
    """The same cases; those with a finding are kept, and said above the bar. all_: print others."""
    for told in cases:
        if told["outcome"] == "finding":
            findings.append(told)
            bar.write(words(told))
        elif all_:
            print(told)
        yield told
