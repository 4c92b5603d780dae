"""Faults on the way between text and tokens."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="everything-moves-up-by-one",
        file="tokenizer_file.py",
        before="library = tokenizers.Tokenizer.from_str(text)",
        after="import re; text = re.sub(r'(?<=\":) *\\d+', lambda m: str(int(m[0]) + 1), text); "
        "library = tokenizers.Tokenizer.from_str(text)",
        seen="Text goes in and comes out unharmed. What the model makes of it is word salad.",
        why="Somebody adds a token to the front of the table. Encoding and decoding move alike, "
        "so a test of the way there and back is content; the model's rows do not move.",
        tests=("test_text.py::test_a_stop_across_tokens",),
        chapter="00",
        breaks="class Shifted:",
    ),
    Fault(
        name="half-a-character",
        file="tokenizer.py",
        before="return self._utf8.decode(piece)",
        after='return piece.decode("utf-8", errors="replace")',
        seen="Emoji, and names with accents, arrive as black diamonds with question marks.",
        why="A token need not end where a character ends. Each is decoded by itself.",
        tests=("test_tokenizer.py::test_the_euro_sign_appears_with_its_third_byte",),
        report="https://github.com/ai-dynamo/dynamo/issues/12630",
        chapter="00",
    ),
    Fault(
        name="wordswithoutspaces",
        file="tokenizer.py",
        before="piece = self._tokenizer._spell(token, self._first)",
        after="piece = self._tokenizer._spell(token, True)",
        seen="Theansweriswrittenlikethis.",
        why="Some tokenizers write a word with its space in front, and the first word of a text "
        "has none. Every token is taken for the first of its text.",
        tests=("test_tokenizer.py::test_a_continuation_keeps_the_space_of_its_first_word",),
        report="https://github.com/huggingface/transformers/issues/22710",
    ),
    Fault(
        name="the-second-space-goes-too",
        file="tokenizer.py",
        before="self._first = False",
        after='self._first = piece in (b"", b" ")',
        seen="An answer that begins with indented code has lost its indentation.",
        why="One space at the very start is to be dropped, once. The drop waits for text to be "
        "there instead, so it takes every space that comes before it.",
        tests=("test_tokenizer.py::test_joined_pieces_are_the_decode_of_any_ids",),
        report="https://github.com/ml-explore/mlx-lm/pull/1754",
    ),
    Fault(
        name="one-beginning-too-many",
        file="tokenizer.py",
        before="return self.encode(text, add_special_tokens=False)",
        after="return self.encode(text)",
        seen="A chat model is a shade worse than in its paper.",
        why="The chat template writes the token that begins a text, and so does the tokenizer. "
        "No training text began twice.",
        tests=("test_chat_template.py::test_a_conversation_has_the_bos_that_its_template_writes",),
        report="https://github.com/vllm-project/vllm/pull/27515",
    ),
    Fault(
        name="a-stop-across-two-tokens",
        file="decode/stops.py",
        before="if complete and may_stop:",
        after="if complete and may_stop and text.endswith(complete[0]):",
        seen="The stop string stands in the answer, and the answer goes on behind it.",
        why="Only the newest piece of text is looked at. A stop that began in the piece before "
        "is never seen whole.",
        tests=("test_stops.py::test_a_stop_that_spans_pieces",),
        report="https://github.com/vllm-project/vllm/pull/3672",
    ),
    Fault(
        name="shown-too-soon",
        file="decode/stops.py",
        before="self._release(max((one.length for one in self._stops), default=0), released)",
        after="self._release(0, released)",
        seen="The first half of the stop string flashes up at the end of every answer.",
        why="What may be the beginning of a stop has to wait until it is one, or is not.",
        tests=("test_stops.py::test_a_false_start_is_released_by_what_breaks_it",),
        report="https://github.com/SharpAI/SwiftLM/pull/132",
    ),
    Fault(
        name="always-six-characters-late",
        file="decode/stops.py",
        before="self._release(max((one.length for one in self._stops), default=0), released)",
        after="self._release(max((len(one.stop) for one in self._stops), default=1) - 1, released)",
        seen="With a long stop string the text limps behind, and its end comes in one piece.",
        why="As many characters are held back as the stop has, whether they look like it or not.",
        tests=("test_stops.py::test_text_that_begins_no_stop_is_not_late",),
        report="https://github.com/smg-project/smg/pull/2203",
    ),
    Fault(
        name="the-stop-token-leaks",
        file="decode/detokenize.py",
        before='return self._show("" if ends else self._decoder.push(token))',
        after="return self._show(self._decoder.push(token))",
        seen="Answers end in a word that nobody said, such as a role's name.",
        why="The token that ends an answer is an id and no text; it is written out like the "
        "others.",
        tests=("test_text.py::test_a_stop_id_leaves_the_last_word_as_it_is",),
        report="https://github.com/vllm-project/vllm/pull/55483",
    ),
]
