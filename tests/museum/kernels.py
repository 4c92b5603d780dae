"""Faults of kernels, and of the emulator that is to find them."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="every-part-weighs-one",
        file="kernels/csrc/decode.cu",
        before="const float weight = expf(lse[split] - peak);",
        after="const float weight = 1.0f;",
        seen="Answers are right up to 256 tokens of context. From the next one on the newest "
        "token is half of all.",
        why="A long context is cut into parts, and the parts' means are added. They have to be "
        "weighed by what went into them.",
        tests=("test_decode_kernel.py::test_rows_of_many_splits_and_of_few",),
        chapter="13",
        breaks='"one: weight 1"',
    ),
    Fault(
        name="nobody-waits-for-the-scores",
        file="kernels/csrc/decode.cu",
        before="__syncthreads();  // so are the scores of all keys",
        after="",
        seen="Models in which query heads share no key are right. In others, now and then, a word.",
        why="A barrier is missing between those who write the scores and those who weigh them.",
        tests=("test_decode_kernel.py::test_any_number_of_query_heads_shares_a_key",),
        report="https://github.com/NervanaSystems/neon/issues/171",
        kin="sums of a softmax were wrong once in a thousand times, by a race that was not found",
        chapter="13",
        breaks='"two: scores"',
    ),
    Fault(
        name="nobody-waits-for-the-peaks",
        file="kernels/csrc/decode.cu",
        before="__syncthreads();  // the peaks of all warps are there",
        after="",
        seen="*The function is then the same as*: fluent, and another text at each run.",
        why="Each warp has found its largest score and looks for the others', which may not be "
        "there yet. So parts are added that were not weighed alike.",
        tests=("test_decode_kernel.py::test_rows_of_many_splits_and_of_few",),
        report="https://github.com/JustVugg/colibri/pull/1098",
        kin="a barrier was missing in the same reduction, between a read and the next write",
        chapter="13",
        breaks='"three: peaks"',
    ),
    Fault(
        name="an-early-warp",
        file="kernels/csrc/cpu_cuda.cpp",
        before="} while (!faulty() && release_lanes(warp));",
        after="} while (!faulty() && (release_lanes(warp) || [&] { bool early = false; "
        "for (int i = 0; i < lanes; ++i) if (warp[i].state == AT_BARRIER) "
        "warp[i].state = READY, early = true; ++barriers; return early; }()));",
        seen="A kernel that is right gives wrong numbers, and the detective finds no race.",
        why="The emulator lets a warp pass a barrier that others have not reached. Its ledger "
        "asks the emulator whether there was a barrier, and is told that there was.",
        tests=("test_emulator.py::test_barriers_hold_and_two_sums_in_a_row_do_not_meet",),
        chapter="C",
        breaks="EARLY = (",
    ),
    Fault(
        name="a-barrier-that-nobody-counts",
        file="kernels/csrc/cpu_cuda.cpp",
        before="for (Thread* one = threads; exists(one); ++one) one->state = READY;",
        after="for (Thread* one = threads; exists(one); ++one) one->state = READY; --barriers;",
        seen="A kernel in which nothing is wrong is accused of a race.",
        why="Everybody waits, as it should be, and the ledger never hears of it.",
        tests=("test_emulator.py::test_what_is_harmless_is_let_through",),
        chapter="C",
        breaks="UNCOUNTED = (",
    ),
    Fault(
        name="a-row-at-a-time",
        file="kernels/__init__.py",
        before="return _linear(x, weight.panels, weight.bias, weight.shape[0])",
        after="return torch.cat([_linear(row[None], weight.panels, weight.bias, weight.shape[0]) "
        "for row in x])",
        seen="Eight users pay for eight passes. All of them get the right text.",
        why="A loop over rows where one product does it: the weights are fetched for each row "
        "anew, and every number is right to the last bit.",
        tests=("test_dispatch.py::test_a_dispatch_mode_sees_the_native_product",),
        chapter="06",
        breaks="class RowByRow(Linear):",
    ),
    Fault(
        name="alone-in-two-halves",
        file="kernels/__init__.py",
        before="return _linear(x, weight.panels, weight.bias, weight.shape[0])",
        after="h = x.clone(); h[:, x.shape[1] // 2 :] = 0; y = lambda part, bias: _linear(part, "
        "weight.panels, bias, weight.shape[0]); return y(x, weight.bias) if len(x) > 1 else y(h, "
        "weight.bias) + y(x - h, None)",
        seen="One text when the server is quiet and another when it is busy, both of them fluent.",
        why="A row that comes alone is multiplied in two halves, to give both cores something. "
        "The sum is another one in its last bits, and a close choice falls the other way.",
        tests=("test_models.py::test_a_rows_bits_do_not_depend_on_who_shares_the_step",),
        report="https://github.com/vllm-project/vllm/issues/5898",
        chapter="06",
        breaks="class HalvesWhenAlone(Linear):",
    ),
]
