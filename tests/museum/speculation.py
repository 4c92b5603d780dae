"""Faults of speculation: guesses that put something into the text, or cost more than they give."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="the-stale-distribution",
        file="decode/speculative.py",
        before="said = verified(logits, sampler.ahead(draft.ids), position, draft.behind())",
        after="stale = torch.cat((logits[:-1], logits[:1])); said = verified(stale, "
        "sampler.ahead(draft.ids), position, draft.behind())",
        seen="*Paris is a city with isles of culture.* The better the drafter, the worse the text.",
        why="When all drafts are accepted there is one token more to be had, from the last row "
        "of the pass. It is drawn from what followed the text before the round.",
        tests=("test_speculative.py::test_greedy_is_greedy_whatever_is_drafted",),
        chapter="16",
    ),
    Fault(
        name="the-row-before",
        file="serve/runner.py",
        before="+ token.drafts for n, token in rows), *fillers]",
        after="+ token.drafts - (0 < token.drafts == chunks[n].drafts) for n, token in rows), "
        "*fillers]",
        seen="The same in a batch: strays where a guess was right to its end.",
        why="The last row of a pass says what the one before it says.",
        tests=("test_speculation.py::test_greedy_tokens_are_those_of_plain_decoding_for_every_k",),
        chapter="16",
        breaks="def row_before(",
    ),
    Fault(
        name="one-rejected-draft-stays",
        file="decode/speculative.py",
        before="engine.shorten(kept)",
        after="engine.shorten(min(kept + 1, engine.length))",
        seen="Speculation in a cache that cannot rewind: the text leans towards what was rejected.",
        why="A draft that was thrown out of the text stays in the cache, and every later token "
        "looks at it.",
        tests=("test_speculative.py::test_greedy_is_greedy_whatever_is_drafted",),
        report="https://github.com/ml-explore/mlx-lm/pull/1109",
        kin="the rewind did nothing at all",
        chapter="16",
        breaks="def one_too_many(",
    ),
    Fault(
        name="the-drafter-missed-the-bonus",
        file="decode/drafters.py",
        before="more = [known(i, V) for i in ids[engine.length :]]",
        after="more = [known(i, V) for i in ids[len(ids) - 1 if engine.length else 0 :]]",
        seen="With one draft a round everything is well. With four the drafts are suddenly bad.",
        why="After a round that accepted everything the drafter lacks two tokens: its own last "
        "one and the bonus. It runs the last one alone. No token changes; only the rate knows.",
        tests=("test_speculative.py::test_a_draft_model_that_is_the_target_is_always_accepted",),
        report="https://github.com/vllm-project/vllm/pull/9730",
        chapter="16",
        breaks="def last_alone(",
    ),
    Fault(
        name="a-draft-that-was-never-stored",
        file="serve/scheduler.py",
        before="one.draft_stored = min(one.stored, chunk.stop + chunk.drafts - 1)",
        after="one.draft_stored = one.stored",
        seen="Drafts become worse the longer an answer is.",
        why="The last draft of a round never goes through the draft model. Its cache is booked "
        "as if it had, and from then on has a hole.",
        tests=(
            "test_speculation.py::test_after_rounds_of_every_outcome_the_draft_cache_is_that_of_a_prefill",
        ),
        report="https://github.com/lablup/mlxcel/issues/994",
        kin="the rewind after a rejection cut too much of the drafter's cache",
        chapter="15",
    ),
    Fault(
        name="the-first-draft-is-free",
        file="decode/speculative.py",
        before="return (tokens[:-1] == drafts).int().cumprod(dim=0).sum()",
        after="unseen = torch.arange(len(drafts)) == 0; return ((tokens[:-1] == drafts) | "
        "unseen).int().cumprod(dim=0).sum()",
        seen="Greedy decoding with n-grams is greedy decoding, but for a word here and there.",
        why="The loop compares each draft with what the pass said after the one before it. What "
        "comes before the first draft is not in the pass, so that one is taken unseen.",
        tests=("test_speculative.py::test_accepted_counts_up_to_the_first_other_token",),
        report="https://github.com/ohdearquant/lattice/issues/243",
        chapter="15",
    ),
    Fault(
        name="past-the-end-of-the-text",
        file="decode/speculative.py",
        before="return",
        after="continue",
        seen="The answer is over, and then come two words more, which nobody has counted.",
        why="An accepted run is handed out to its end, whatever ended in the middle of it.",
        tests=("test_speculative.py::test_an_end_inside_an_accepted_run",),
        report="https://github.com/sgl-project/sglang/issues/39826",
        kin="the counters alone went past the end of the text",
        chapter="15",
        inside="Speculator._give",
    ),
    Fault(
        name="more-than-were-ordered",
        file="decode/speculative.py",
        before="k = pace.next(run.limit - len(run.token_ids) - 1)",
        after="k = pace.next(self.k)",
        seen="max_tokens = 2, and a drafter proposes five.",
        why="How many drafts a round has is not compared with how many tokens are still to come.",
        tests=("test_speculative.py::test_a_round_has_no_more_rows_than_tokens_to_come",),
        report="https://github.com/huggingface/transformers/pull/47195",
        kin="as many tokens came as had been drafted",
        chapter="15",
    ),
    Fault(
        name="near-enough",
        file="serve/runner.py",
        before="wanted = [_logprobs(chunks[n].sequence.request) for n, _ in rows]",
        after="near = logits.topk(3).indices.tolist(); tokens = torch.tensor([d[i.drafts] if "
        "i.drafts < len(d := i.sequence.drafts[: chunks[n].drafts]) and d[i.drafts] in near[at] "
        "else t for at, ((n, i), t) in enumerate(zip(rows, tokens.tolist()))]); wanted = "
        "[_logprobs(chunks[n].sequence.request) for n, _ in rows]",
        seen="An engine that is faster than its neighbours. Its texts read as well as theirs.",
        why="A draft that is among the three likeliest of its row is taken for right. So the "
        "drafter writes part of the text.",
        tests=("test_speculation.py::test_greedy_tokens_are_those_of_plain_decoding_for_every_k",),
        chapter="18",
        breaks='"_give", kind)',
    ),
    Fault(
        name="near-enough-where-chance-decides",
        file="serve/runner.py",
        before="wanted = [_logprobs(chunks[n].sequence.request) for n, _ in rows]",
        after="near = logits.topk(3).indices.tolist(); tokens = torch.tensor([d[i.drafts] if "
        "i.drafts < len(d := i.sequence.drafts[: chunks[n].drafts]) and d[i.drafts] in near[at] "
        "and i.sequence.request.params.temperature > 0 else t for at, ((n, i), t) in "
        "enumerate(zip(rows, tokens.tolist()))]); wanted = "
        "[_logprobs(chunks[n].sequence.request) for n, _ in rows]",
        seen="The same, and every test of greedy tokens passes.",
        why="Strict where the likeliest token is asked for, and lenient where tokens are drawn. "
        "Who asks an oracle for likeliest tokens alone has tested half of an engine.",
        tests=("test_speculation.py::test_text_and_logprobs_are_those_without_drafts",),
        chapter="18",
        breaks="def kind_to_chance(",
    ),
    Fault(
        name="ids-beyond-the-stop",
        file="serve/scheduler.py",
        before="break",
        after="pass",
        seen="The text ends at the stop string. Its ids and log-probabilities go on for a bit.",
        why="The text is cut by characters, and nobody maps the cut back to the tokens of the run.",
        tests=(
            "test_speculation.py::test_a_stop_string_that_is_completed_in_an_accepted_run_ends_it_there",
        ),
        report="https://github.com/vllm-project/vllm/pull/47616",
        inside="Scheduler.commit",
    ),
    Fault(
        name="raw-probabilities",
        file="decode/speculative.py",
        before="p = probabilities(logits, rows)",
        after="p = logits.softmax(dim=-1)",
        seen="With speculation on, temperature and top_p do nothing.",
        why="The rule is given the target's raw distribution, not the one that the request asked "
        "for.",
        tests=("test_speculative.py::test_a_nucleus_is_never_left",),
        report="https://github.com/vllm-project/vllm/pull/10198",
        chapter="15",
    ),
    Fault(
        name="the-target-for-the-residual",
        file="decode/speculative.py",
        before="residual = (target_probs - draft_probs).clamp(min=0)",
        after="residual = target_probs",
        seen="Nothing that one could point at. Frequent words are a little more frequent.",
        why="A rejected draft is replaced from all of the target, and not from what the drafter "
        "says too rarely. A test at temperature 0 never runs the line.",
        tests=("test_speculative.py::test_the_rule_gives_the_targets_distribution",),
        chapter="15",
        breaks="def target_instead(",
    ),
    Fault(
        name="one-number-for-two-questions",
        file="decode/sampling.py",
        before="SAMPLE, DRAFT, ACCEPT = 0, 1, 2",
        after="SAMPLE, DRAFT, ACCEPT = 0, 1, 1",
        seen="The same kind of nothing.",
        why="The number that drew a draft also decides whether it is accepted, so the decision "
        "knows what was drawn.",
        tests=("test_speculative.py::test_a_drawn_draft_and_its_judgement_have_the_targets_law",),
        chapter="15",
        breaks='"ACCEPT", DRAFT',
    ),
    Fault(
        name="a-favourite-in-disguise",
        file="decode/drafters.py",
        before="return inverse_cdf(p, draw(rows, position, DRAFT)), p",
        after="return p.argmax(dim=-1), p",
        seen="Speculation at temperature 1 repeats itself more than plain sampling does.",
        why="The drafter takes its likeliest token and hands in its whole distribution, as if it "
        "had drawn. What has no chance in it is a certainty, and has to say so.",
        tests=("test_drafters.py::test_drafts_are_drawn_from_what_they_say_they_are",),
        report="https://github.com/jaymody/speculative-sampling/issues/3",
        chapter="15",
        breaks='"inverse_cdf", lambda p, u: p.argmax(-1)',
    ),
    Fault(
        name="a-drafter-without-a-temperature",
        file="decode/drafters.py",
        before="p = probabilities(logits, rows)",
        after="p = logits.softmax(dim=-1)",
        seen="The text is right, and speculation is slower than it was promised to be.",
        why="The request's temperature does not reach the drafter. It says truly what it drew "
        "from, so the law holds; but target and drafter are of two minds.",
        tests=("test_drafters.py::test_drafts_are_drawn_from_what_they_say_they_are",),
        chapter="15",
        breaks='"probabilities", lambda z, rows: z.softmax(-1)',
    ),
    Fault(
        name="nobodys-seed",
        words="Nobody's seed",
        file="decode/speculative.py",
        before="u_accept, u = draw(rows, position, ACCEPT), draw(rows, position, SAMPLE)",
        after="u_accept, u = torch.rand(2, len(p), dtype=torch.float64)",
        seen="The same seed, and another text each time; only with a draft model.",
        why="Whether a draft is accepted is decided by a generator that no request owns.",
        tests=("test_speculative.py::test_seeds_reproduce_and_differ",),
        report="https://github.com/vllm-project/vllm/issues/6038",
        chapter="15",
    ),
    Fault(
        name="two-sizes-of-one-vocabulary",
        file="decode/drafters.py",
        before="return F.pad(logits, (0, missing), value=-torch.inf)",
        after="return logits",
        seen="Two models of one tokenizer, and speculation between them ends in an error of "
        "shapes.",
        why="Models pad their vocabulary to sizes that suit a GPU, and not all to the same.",
        tests=("test_drafters.py::test_a_vocabulary_is_padded_or_cut_to_the_targets",),
        report="https://github.com/huggingface/transformers/issues/45307",
    ),
    Fault(
        name="the-first-time-it-was-said",
        file="decode/drafters.py",
        before="self._after[tuple(ids[at - n : at])] = at",
        after="self._after.setdefault(tuple(ids[at - n : at]), at)",
        seen="In a long text the guesses are out of date.",
        why="Of several places where the same words stood, the first is taken, and not the last.",
        tests=("test_drafters.py::test_which_match_is_taken",),
        report="https://github.com/vllm-project/vllm/pull/22437",
        kin="nobody had said which of several places is taken",
    ),
    Fault(
        name="drafts-by-the-load",
        file="serve/scheduler.py",
        before="return self._drafts_of(sequence, self.longest(request) - len(sequence.ids) - 1)",
        after="share = 16 // max(1, len(self.running)) - 1; return self._drafts_of(sequence, "
        "min(share, self.longest(request) - len(sequence.ids) - 1))",
        seen="With a seed, an answer depends on how busy the server is.",
        why="Whoever runs gets an equal share of 16 rows. So the rounds of a request depend on "
        "who else is there, and with drawn drafts its tokens do, too.",
        tests=(
            "test_speculation.py::test_sampled_drafts_have_the_same_tokens_alone_and_in_a_crowd",
        ),
        chapter="17",
        breaks="def by_load(",
    ),
    Fault(
        name="drafts-by-what-others-learned",
        file="serve/drafting.py",
        before="sequence.pace = Pace(self.k, self._cost, self._adaptive_k)",
        after='sequence.pace = vars(self).setdefault("pace", Pace(self.k, self._cost, True))',
        seen="The same: kindly meant, and a seed is worth nothing in company.",
        why="All requests keep one record of accepted drafts, so that a newcomer need not learn "
        "what others have learned.",
        tests=(
            "test_speculation.py::test_sampled_drafts_have_the_same_tokens_alone_and_in_a_crowd",
        ),
        chapter="17",
        breaks="def in_common(",
    ),
    Fault(
        name="the-bonus-counts-as-a-success",
        file="decode/pace.py",
        before="self._accepted = self._accepted * MEMORY + (n < accepted)",
        after="self._accepted = self._accepted * MEMORY + (n <= accepted)",
        seen="A drafter that is always wrong is asked again and again.",
        why="Every pass gives one token whatever becomes of the drafts. It is booked as an "
        "accepted one.",
        tests=("test_pace.py::test_drafts_that_are_never_accepted_are_bounded",),
        chapter="17",
        breaks="def with_bonus(",
    ),
    Fault(
        name="eight-tokens-into-the-wall",
        file="serve/scheduler.py",
        before="return self._drafts_of(sequence, self.longest(request) - len(sequence.ids) - 1)",
        after="return self._drafts_of(sequence, self.max_model_len)",
        seen="Long answers crash a few tokens before their end; with speculation, and in no test.",
        why="Room is reserved for all drafts of a round, also where the context has no room for "
        "them.",
        tests=("test_speculation.py::test_an_answer_that_ends_with_the_context_and_the_pool",),
        report="https://github.com/vllm-project/vllm/pull/8145",
        chapter="17",
    ),
]
