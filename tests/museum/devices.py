"""Faults of several devices: what the ranks of a model have to say to each other."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="a-bias-from-everybody",
        file="model/weights.py",
        before="if weight.bias is not None and self._ranks.rank > 0:",
        after="if weight.bias is not None and self._ranks.rank > 99:",
        seen="One GPU says one thing and two say another, both in good English. Most models are "
        "not touched: they have no biases there.",
        why="Each rank's product is one term of a sum, and each adds the bias to its own. With "
        "two ranks there are two of it.",
        tests=("test_parallel.py::test_logits_are_those_of_one_process",),
        report="https://github.com/huggingface/text-generation-inference/issues/1036",
        chapter="B",
        breaks="def bias_on_each(",
        inside="PartReader.linear",
    ),
    Fault(
        name="a-sum-that-nobody-took",
        file="model/weights.py",
        before="weight.join = self._ranks.sum",
        after='weight.join = None if "h.1.mlp.c_proj" in parts else self._ranks.sum',
        seen="Garbage, or another text, with several GPUs only. All of them agree on it.",
        why="In one layer the terms are not added up, and each rank goes on with its own. At the "
        "end all put their parts of the logits together, and choose from the same nonsense.",
        tests=(
            "test_parallel.py::test_predicted_bytes_are_counted",
            "test_parallel.py::test_logits_are_those_of_one_process",
        ),
        report="https://github.com/sgl-project/sglang/pull/14811",
        kin="it was the last product of a Mamba layer",
        chapter="B",
        breaks="def not_added(",
        inside="PartReader.linear",
    ),
    Fault(
        name="each-its-own-dice",
        file="parallel.py",
        before="return mine if self.count == 1 else self._message(NUMBER, mine)[1]",
        after="return mine",
        seen="Nothing, at first: only rank 0 is heard. Then something relies on all ranks having "
        "the same text.",
        why="A request without a seed draws one, and each rank draws for itself. From the first "
        "token on which they differ, the ranks run different texts.",
        tests=("test_parallel.py::test_what_differs_is_rank_0s_word",),
        report="https://github.com/vllm-project/vllm/pull/17929",
        chapter="B",
        breaks="def own_dice(",
        inside="Ranks.number",
    ),
]
