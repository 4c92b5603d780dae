"""Benchmarks: each module measures one thing, prints one table, and writes it with `--json FILE`.

A module has `add_arguments(parser)` and `run(args) -> exit status`; the command line imports it
only when it is asked for. Its name and sentence stand here, so that help needs no torch.
"""

BENCHES = {
    "device": "a GPU from end to end: build, kernels, graphs, bandwidth, latency; or a dry run",
    "latency": "one stream: steps run or replayed, ops plain or fused, against the memory's speed",
    "peers": "one greedy stream beside transformers: same weights, same prompt, alternating runs",
    "replay": "one trace in two memories: slots reserved at admission, or blocks as tokens come",
    "scale": "what scheduling costs a token: 1,000 to 100,000 requests waiting, and no model",
    "traffic": "many users: static batches against continuous ones, and transformers",
}
