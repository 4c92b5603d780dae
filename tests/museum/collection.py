"""All faults, by kind and in the order of the page."""

from museum import (
    cache,
    detokenize,
    devices,
    graphs,
    inputs,
    kernels,
    loading,
    sampling,
    scheduler,
    server,
    speculation,
    stats,
)
from museum.fault import Fault

KINDS: dict[str, list[Fault]] = {
    "Memory": cache.FAULTS,
    "Who runs": scheduler.FAULTS,
    "The model in the file": loading.FAULTS,
    "The next token": sampling.FAULTS,
    "Guessing ahead": speculation.FAULTS,
    "Text": detokenize.FAULTS,
    "What is recorded": graphs.FAULTS,
    "Kernels": kernels.FAULTS,
    "The clock": stats.FAULTS,
    "At the door": inputs.FAULTS,
    "On the line": server.FAULTS,
    "Several devices": devices.FAULTS,
}
FAULTS = [fault for faults in KINDS.values() for fault in faults]
