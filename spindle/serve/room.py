"""How many blocks there is room for: by default, and at most."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from spindle import parallel
from spindle.errors import RequestError, shown
from spindle.model.layers import Model


def default_blocks(
    models: Sequence[Model], block_size: int, max_seqs: int, max_model_len: int
) -> int:
    """Room for all sequences at their longest, within a quarter of the free memory.

    models: whose caches have these blocks, the target and perhaps a draft model. Ranks have as many
    as fit everywhere.
    """
    device, ranks = models[0].device, parallel.current()
    block_bytes, free = _block_bytes(models, block_size), _free_bytes(device)
    if device.type == "cuda":
        return ranks.least(max(1, int(0.9 * free) // block_bytes - 1))  # and the scratch block
    most = max_seqs * -(-max_model_len // block_size)
    return ranks.least(max(1, min(most, free // (4 * ranks.here) // block_bytes - 1)))


def check_memory(
    models: Sequence[Model], num_blocks: int, host_blocks: int, block_size: int
) -> None:
    """RequestError, with the numbers, for a pool that is larger than the free memory."""
    block_bytes, here = _block_bytes(models, block_size), models[0].device
    cpu = torch.device("cpu")
    blocks = {here: num_blocks} | {cpu: host_blocks + num_blocks * (here == cpu)}
    for device, number in blocks.items():
        free = _free_bytes(device)
        size = number * block_bytes
        if size + block_bytes > free:  # and the scratch block
            wanted = f"{size / 1e9:.1f} GB" if size < 2**80 else "more than there is anywhere"
            raise RequestError(
                f"{shown(number)} blocks of {shown(block_bytes)} bytes on the {device.type}: "
                f"{wanted}, and {free / 1e9:.1f} GB are free; lower num_blocks, host_blocks or "
                "block_size"
            )


def _block_bytes(models: Sequence[Model], block_size: int) -> int:
    return block_size * sum(model.config.kv_bytes(model.dtype.itemsize) for model in models)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
