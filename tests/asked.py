"""Requests by lot: prompts with a stem in common, and every way of sampling."""

import random
from dataclasses import replace

from spindle import SamplingParams


def requests_by_lot(
    rng: random.Random, count: int, vocab_size: int, longest: int
) -> list[tuple[int, list[int], SamplingParams]]:
    """So many (step in which it comes, prompt, parameters); longest: a prompt without its stem."""
    stem = [rng.randrange(vocab_size) for _ in range(12)]
    requests = []
    for at in range(count):
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        prompt, most = stem[: rng.randrange(12)] + own, rng.randint(1, 24)
        params = SamplingParams(
            max_tokens=most,
            temperature=rng.choice([0, 0, 0, 0.8, 1.3]),
            top_p=rng.choice([1, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0, 0, 0.02]),
            seed=at,
            min_tokens=rng.choice([0, 0, min(2, most)]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.choice([None, None, [3, 4]]),
            repetition_penalty=rng.choice([1, 1, 1.3]),
            frequency_penalty=rng.choice([0, 0, 0.4]),
            presence_penalty=rng.choice([0, 0, 0, 0.4]),
            logprobs=rng.choice([None, None, 0, 3]),
        )
        if params.temperature and rng.random() < 0.4:
            params = replace(params, n=rng.randint(2, 3))
        requests.append((rng.randrange(8), prompt, params))
    return requests
