"""Faults of what is recorded once and replayed: yesterday's numbers, addresses and decisions."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="the-position-of-the-recording",
        file="kvcache/static.py",
        before="self.positions = at.flatten()",
        after="self.positions = torch.tensor(at.flatten().tolist(), device=at.device)",
        seen="The first words after a capture are right. Then the text circles.",
        why="Python counts how far the text has come. A graph has the number that Python had "
        "when it was recorded.",
        tests=("test_capture.py::test_a_recorded_step_is_the_eager_one_bit_for_bit",),
        report="https://github.com/paiml/aprender/pull/2030",
        chapter="14",
        breaks='"position": (static, "StaticView", Baked)',
    ),
    Fault(
        name="a-new-tensor-of-an-old-name",
        file="decode/step.py",
        before="self.tokens.copy_(sample(self.logits, self.sampling, self.seq_lens))",
        after="self.tokens = sample(self.logits, self.sampling, self.seq_lens)",
        seen="The engine answers with one token, again and again.",
        why="A graph writes to the address that it was recorded with. Who looks under the name "
        "finds another tensor.",
        tests=("test_capture.py::test_a_recorded_step_is_the_eager_one_bit_for_bit",),
        chapter="14",
        breaks="def rebound(",
    ),
    Fault(
        name="just-a-look",
        file="decode/step.py",
        before="self.draw()",
        after="self.draw(), self.tokens.tolist()",
        seen="On a CPU nothing at all. On a GPU the capture fails, or every step waits.",
        why="The host reads the token, to see that it is one. To read from a device is to wait "
        "for it.",
        tests=("test_capture.py::test_a_decode_step_never_leaves_a_device_that_is_not_there",),
        chapter="14",
        breaks="def look(",
        inside="DecodeStep.run",
    ),
    Fault(
        name="rounded-up-to-32",
        file="kvcache/static.py",
        before="return attend_chunks(q, keys[:R], values[:R], self._hidden, scale)",
        after="S = -(-int(self._seq_lens.numpy().max() + len(self._ahead)) // 32) * 32; return "
        "attend_chunks(q, keys[:R, :S], values[:R, :S], self._hidden[:, :, :S], scale)",
        seen="Every text is right up to its 33rd token.",
        why="Attention over every slot is a waste, so Python takes as many as are needed, "
        "rounded up. The recording keeps the 32 of its day. A check of 16 tokens sees nothing.",
        tests=("test_capture.py::test_a_recorded_step_is_the_eager_one_bit_for_bit",),
        chapter="14",
        breaks="class Rounded(StaticView):",
    ),
    Fault(
        name="the-cache-was-outgrown",
        file="decode/rows.py",
        before="self._forget_steps()",
        after='hasattr(self, "_steps") or self._forget_steps()',
        seen="Answers are right up to the length at which the cache doubles.",
        why="The steps that were recorded over the old cache keep it alive, and go on reading "
        "and writing there.",
        tests=("test_rows.py::test_a_cache_that_grows_in_mid_run_changes_no_token",),
        report="https://github.com/paiml/aprender/pull/2030",
        chapter="12",
        breaks="def remember(",
        inside="StaticRows._take_over",
    ),
    Fault(
        name="given-up-one-call-too-early",
        file="kernels/program.py",
        before="if one.last >= span.first)",
        after="if one.last > span.first)",
        seen="On this machine nothing; after the next version of some op, rubbish.",
        why="A temporary makes room for the next one in the very call that still reads it.",
        tests=("test_cpu_graph.py::test_spans_in_use_together_do_not_overlap",),
        chapter="12",
        breaks="def too_early(",
    ),
    Fault(
        name="a-table-one-column-short",
        file="serve/recorded.py",
        before="self._width = -(-max_model_len // kv.pool.block_size)",
        after="self._width = -(-max_model_len // kv.pool.block_size) - 1",
        seen="The replay fails, for the one request that fills its context.",
        why="Graphs are captured for block tables of a width. The longest table is one wider.",
        tests=("test_graphs.py::test_a_context_filled_to_its_last_slot",),
        report="https://github.com/GeeeekExplorer/nano-vllm/issues/190",
        chapter="14",
    ),
    Fault(
        name="a-batch-nobody-recorded",
        file="serve/recorded.py",
        before="return 1 <= rows <= self._buckets[-1]",
        after="return 1 <= rows",
        seen="The server is well with as many users as it was set up for, and dies of one more.",
        why="Whether a step may be replayed, and which recording it takes, are two lists.",
        tests=(
            "test_speculation.py::test_as_many_rows_are_recorded_as_pay_and_larger_steps_are_run",
        ),
        report="https://github.com/vllm-project/vllm/pull/7999",
        chapter="14",
    ),
    Fault(
        name="rows-of-nobody-in-somebodys-block",
        file="serve/recorded.py",
        before="return Row.of(0, 0, [self.kv.scratch], self.kv.pool.block_size)",
        after="return Row.of(0, 0, [0], self.kv.pool.block_size)",
        seen="With five users one of them gets nonsense. With four, and with eight, nobody.",
        why="A graph for eight rows runs with five; the other three write somewhere. Block 0 is "
        "somebody's.",
        tests=("test_graphs.py::test_padding_rows_touch_the_scratch_block_alone",),
        report="https://github.com/xLLM-AI/xllm/pull/1939",
        kin="the rows of nobody had no places of their own to read and write",
        chapter="14",
    ),
]
