"""Log-probabilities of what was sampled, and of what could have been.

They are the log-softmax of the logits as the model gave them, before min_tokens, penalties,
temperature and filters: a report of the model, which no sampling parameter changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Logprob:
    """One token that could be next: its log-probability, and how many are likelier, plus one."""

    token_id: int
    logprob: float  # natural
    rank: int  # 1 for the likeliest; tokens of equal logits have equal ranks


@dataclass(frozen=True)
class TokenLogprobs:
    """One step: the sampled token, and the likeliest ones, by rank and then by id.

    `top` has the sampled token exactly once: in its place if it is among the k asked for, or else
    as the last of k + 1.
    """

    sampled: Logprob
    top: tuple[Logprob, ...]


def logprob_table(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """(id, logprob, rank) of the sampled token and of the k likeliest, in one tensor for one copy.

    logits [R, V], tokens [R] -> [R, 1 + k, 3] float64, the sampled one first, then by rank; of
    equal logits the lower id comes first. k may exceed V: then V of them.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    at = tokens[:, None].clamp(min=0)  # a row that is no distribution has the token -1
    top = _likeliest(logits, min(k, logits.shape[-1]))  # [R, k]
    larger = (logits > logits.gather(1, at)).sum(dim=-1, keepdim=True)
    falling = -logits.gather(1, top)
    rank = 1 + torch.cat((larger, torch.searchsorted(falling, falling)), dim=1)  # [R, 1 + k]
    logprob = logits.log_softmax(dim=-1).gather(1, torch.cat((at, top), dim=1))
    table = (torch.cat((tokens[:, None], top), dim=1), logprob, rank)
    return torch.stack([column.double() for column in table], dim=-1)


def _likeliest(logits: Tensor, k: int) -> Tensor:
    """The ids of the k largest logits [R, V], largest first, of equals the lower id -> [R, k].

    topk alone leaves open which of equals it takes, and to sort all of V is slow on a CPU.
    """
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    least = logits.topk(k, dim=-1).values[:, -1:]
    larger, equal = logits > least, logits == least
    room = k - larger.sum(dim=-1, keepdim=True)
    kept = larger | (equal & (equal.cumsum(dim=-1) <= room))  # k of each row
    ids = torch.arange(logits.shape[-1], device=logits.device)
    rising = kept.mul(len(ids) - ids).topk(k, dim=-1).indices
    order = logits.gather(1, rising).argsort(dim=-1, descending=True, stable=True)
    return rising.gather(1, order)


def token_logprobs(row: list[list[float]]) -> TokenLogprobs:
    """The record of one row [1 + k, 3] of the table, as a list."""
    sampled, *top = (Logprob(int(token), logprob, int(rank)) for token, logprob, rank in row)
    if sampled.token_id not in [one.token_id for one in top]:
        top.append(sampled)
    return TokenLogprobs(sampled, tuple(top))
