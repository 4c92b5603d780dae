"""What the sampling tests ask of transformers: its logits processors, and generate with them."""

from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process


def repetition(logits: Tensor, ids: list[int], penalty: float) -> Tensor:
    """Logits [V] after transformers' repetition penalty for these ids, prompt and output."""
    process = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    return process(torch.tensor([ids]), logits[None].clone())[0]


def min_tokens(
    logits: Tensor, prompt: list[int], output: list[int], least: int, eos_ids: list[int]
) -> Tensor:
    """Logits [V] after transformers' min_new_tokens."""
    process = logits_process.MinNewTokensLengthLogitsProcessor(len(prompt), least, eos_ids)
    return process(torch.tensor([prompt + output]), logits[None].clone())[0]


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int, **options: Any) -> list[int]:
    """The `count` ids that generate appends greedily, with options such as repetition_penalty."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        **options,
    )
    return out[0, len(ids) :].tolist()
