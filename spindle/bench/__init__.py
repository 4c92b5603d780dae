"""Benchmarks: each module measures one thing, prints one table, and writes it with `--json FILE`.

A module has `add_arguments(parser)` and `run(args) -> exit status`; the command line imports it
only when it is asked for. Its name and sentence stand here, so that help needs no torch.
"""

BENCHES = {
    "device": "a GPU from end to end: build, kernels, graphs, bandwidth, latency; or a dry run",
    "fleet": "many replicas behind a router, simulated with the costs of steps measured here",
    "latency": "one stream: steps run or replayed, ops plain or fused, against the memory's speed",
    "peers": "one stream, eight, and traffic, beside the engines that are installed, by turns",
    "profile": "a decode step part by part, and from the plain step to the bound, lever by lever",
    "quantize": "weights in 8 bits: bytes, logits, how well a text is foretold, an answer",
    "replay": "one trace in two memories: slots reserved at admission, or blocks as tokens come",
    "scale": "cost as work grows: requests waiting, context, rows, a prompt's length, tokens held",
    "spec": "speculation: drafts against plain decoding, by turns, and what arithmetic predicts",
    "traffic": "many users: static batches against continuous ones, and transformers",
}
