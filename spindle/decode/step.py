"""One decode step as one function over buffers that stay where they are.

What differs from step to step is read from tensors on the device: the tokens, the lengths of the
rows, what the sampler counts. So a step can be run, or recorded once and replayed (`graphs`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from spindle.decode.sampling import SamplingRows, probabilities, sample
from spindle.kernels.twins import wide
from spindle.kvcache.static import StaticKV
from spindle.model.layers import Model


class DecodeStep:
    """A token for each of R rows: the pass over it, the draw of the next one, the lengths moved on.

    `tokens` [R] go in, and the next ones are there afterwards; `logits` [R, V] and, if asked for,
    `probs` [R, V] are those that they were drawn from. `seq_lens` [R] and the counts of `sampling`
    are changed by `run`, which is all tensor operations: it tells the host nothing.
    """

    def __init__(
        self,
        model: Model,
        kv: StaticKV,
        seq_lens: Tensor,
        sampling: SamplingRows,
        keep_probs: bool = False,
    ) -> None:
        self.model, self.seq_lens, self.sampling = model, seq_lens, sampling
        self.view = kv.decode(seq_lens)
        R, V = len(seq_lens), model.config.vocab_size
        self.tokens = torch.zeros_like(seq_lens)
        self.logits = torch.zeros(R, V, dtype=model.dtype, device=seq_lens.device)
        self.probs = wide(torch.zeros_like(self.logits)) if keep_probs else None

    def run(self) -> None:
        """One step. A row from whose logits nothing can be sampled gets the token -1."""
        self.forward()
        self.draw()

    @torch.inference_mode()
    def forward(self) -> None:
        """The pass over `tokens`: their keys and values are stored, their `logits` are there."""
        hidden = self.model(self.tokens, self.view.begin())  # [R, E]
        self.seq_lens.add_(1)
        self.logits.copy_(self.model.logits(hidden))

    @torch.inference_mode()
    def draw(self) -> None:
        """The tokens that follow from `logits`, at positions `seq_lens`, into `tokens`."""
        if self.probs is not None:
            self.probs.copy_(probabilities(self.logits, self.sampling))
        self.tokens.copy_(sample(self.logits, self.sampling, self.seq_lens))
        self.sampling.append(self.tokens.clamp(min=0))  # -1 ends the answer: what counts is moot

    def state(self) -> list[Tensor]:
        """What `run` reads and changes, but for the cache."""
        probs = [] if self.probs is None else [self.probs]
        return [self.tokens, self.seq_lens, self.logits, *probs, *self.sampling.tensors()]

    def inputs(self) -> list[Tensor]:
        """What `run` both reads and changes, but for cache and lengths: to take a step back."""
        return [self.tokens, *(self.sampling.tensors() if self.sampling.counts else [])]


class ChunkStep:
    """C given tokens for each of R rows, and the logits after each: nothing is drawn.

    `tokens` [R, C] go in, `logits` [R, C, V] come out, `seq_lens` [R] grow by C.
    """

    def __init__(self, model: Model, kv: StaticKV, seq_lens: Tensor, count: int) -> None:
        self.model, self.seq_lens = model, seq_lens
        self.view = kv.chunk(seq_lens, count)
        R, V = len(seq_lens), model.config.vocab_size
        self.tokens = torch.zeros(R, count, dtype=torch.int64, device=seq_lens.device)
        self.logits = torch.zeros(R, count, V, dtype=model.dtype, device=seq_lens.device)

    def run(self) -> None:
        """One step, in tensor operations alone."""
        self.forward()

    @torch.inference_mode()
    def forward(self) -> None:
        """All of it."""
        hidden = self.model(self.tokens.flatten(), self.view.begin())  # [R * C, E]
        self.seq_lens.add_(self.tokens.shape[1])
        self.logits.copy_(self.model.logits(hidden).view_as(self.logits))

    def draw(self) -> None:
        """Nothing: the caller has the logits."""

    def state(self) -> list[Tensor]:
        """What `run` reads and changes, but for the cache."""
        return [self.tokens, self.seq_lens, self.logits]

    def inputs(self) -> list[Tensor]:
        """What `run` both reads and changes, but for cache and lengths: nothing."""
        return []
