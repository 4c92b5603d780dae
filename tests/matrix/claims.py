"""What each cell claims: proven, proven on a sample, not applicable (why), not proven (why)."""

from __future__ import annotations

from dataclasses import dataclass

from matrix.rows import ALL_ROWS, OF_SMOLLM2

COLUMNS = ("transformers", "plain path", "drawn", "law")
PROVEN, SAMPLE, NOT_APPLICABLE, NOT_PROVEN = "proven", "sample", "not applicable", "not proven"
SMOLLM2 = OF_SMOLLM2.name


@dataclass(frozen=True)
class Claim:
    """A cell's status, and the words that go with it: why, or what exactly is compared."""

    status: str = PROVEN
    words: str = ""
    instead: bool = False  # something else is tested instead, as the words say

    @property
    def is_tested(self) -> bool:
        return self.status in (PROVEN, SAMPLE) or self.instead


DRAWS_NOTHING = Claim(NOT_APPLICABLE, "a beam search draws nothing")
ONE_IS_LIKELIEST = Claim(
    words="several greedy answers are the same: here each of n answers is "
    "drawn from the likeliest token alone (`top_k=1`), and has to be the greedy one"
)
OTHER_TOKENS = Claim(
    NOT_APPLICABLE,
    "a draft model changes which tokens are drawn, not how often each is; tested instead: the same "
    "seed gives the same answer in company and alone, with the same draft model",
    instead=True,
)
UNLESS_DRAFTED = "where a draft model is among what is drawn by lot, "
WITH_THE_SAME = Claim(words=UNLESS_DRAFTED + "as alone with the same draft model")
LEFT_OUT = UNLESS_DRAFTED + "the law alone looks at what is drawn"
TOO_FEW = Claim(
    NOT_PROVEN,
    "its answers are too few to say anything of how often each token comes. The law is proven in "
    "the other rows, which draw by the same code",
)
CLAIMS: dict[tuple[str, str], Claim] = {
    (row.name, column): Claim(PROVEN if row.dtype.itemsize == 8 or column == "law" else SAMPLE)
    for row in ALL_ROWS
    for column in COLUMNS
}
CLAIMS |= {
    ("fork, n > 1", "transformers"): ONE_IS_LIKELIEST,
    ("fork, n > 1", "plain path"): ONE_IS_LIKELIEST,
    ("beam", "transformers"): Claim(
        words="with an EOS against its beam search, token for token; one beam without an EOS "
        "against greedy `generate`"
    ),
    ("beam", "plain path"): Claim(words="without an EOS, against beams that are kept by hand"),
    ("beam", "drawn"): DRAWS_NOTHING,
    ("beam", "law"): DRAWS_NOTHING,
    ("draft model", "drawn"): OTHER_TOKENS,
    ("all at once", "drawn"): WITH_THE_SAME,
    ("all at once, native", "drawn"): Claim(SAMPLE, LEFT_OUT),
    ("one stream, drafts", "drawn"): Claim(words=LEFT_OUT),
    (SMOLLM2, "transformers"): Claim(SAMPLE, "one pass of transformers over prompt and answer"),
    (SMOLLM2, "plain path"): Claim(SAMPLE, "one pass without a cache over prompt and answer"),
    (SMOLLM2, "drawn"): Claim(SAMPLE),
}
CLAIMS |= {(row.name, "law"): TOO_FEW for row in ALL_ROWS if not row.law_count}
