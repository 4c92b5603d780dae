"""Faults of what comes from outside and should not have come in."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="the-empty-prompt",
        file="decode/params.py",
        before="if not prompt:",
        after="if prompt is None:",
        seen="Somebody presses Enter, and the engine is gone, with everybody's answers.",
        why="An empty text is no tokens where the tokenizer adds none. The forward pass of "
        "nothing is an exception in the loop that serves all.",
        tests=("test_llm.py::test_a_bad_request_is_refused_alone_and_nothing_changes",),
        report="https://github.com/vllm-project/vllm/issues/7632",
    ),
    Fault(
        name="minus-one-is-the-last",
        file="tokenizer.py",
        before="not 0 <= value < limit:",
        after="not value < limit:",
        seen="A wrong token id gives a plausible answer on the CPU and kills the GPU.",
        why="Only the upper end is checked. Index -1 wraps around to the last row of the "
        "embedding.",
        tests=("test_tokenizer.py::test_a_wrong_id_is_refused_by_its_position",),
        report="https://github.com/vllm-project/vllm/pull/51795",
    ),
    Fault(
        name="full-to-the-brim",
        file="decode/params.py",
        before="if len(prompt) > most:",
        after="if len(prompt) >= most:",
        seen="A prompt of exactly the context's length is refused as too long by no tokens.",
        why="Off by one, in the other direction than usual.",
        tests=("test_llm.py::test_a_prompt_that_fills_the_context",),
        report="https://github.com/vllm-project/vllm/issues/40302",
        kin="such a prompt was let in, and failed an assertion",
    ),
    Fault(
        name="nothing-please",
        file="serve/llm.py",
        before="if self.scheduler.longest(request) == len(request.prompt):",
        after="if False:",
        seen="max_tokens = 0, and one token comes.",
        why="The loop takes a token and then looks whether it was one too many.",
        tests=("test_llm.py::test_no_tokens_asked_for_is_an_answer_of_none",),
        report="https://github.com/vllm-project/vllm/issues/6521",
        kin="it was a crash",
    ),
    Fault(
        name="not-larger-and-not-smaller",
        file="decode/params.py",
        before="if not (is_real and low <= value <= high):",
        after="if not is_real or value < low or value > high:",
        seen="A temperature of NaN is accepted. What comes is an endless row of one token.",
        why="NaN is neither below a bound nor above one. Ask whether a number is inside, never "
        "whether it is outside.",
        tests=("test_sampling.py::test_a_bad_value_is_refused_by_name",),
        report="https://github.com/ggml-org/llama.cpp/issues/19367",
    ),
]
