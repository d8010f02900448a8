"""Throughput with and without prefix reuse, in the shapes of SGLang's evaluation.

- `few-shot`: questions with four choices behind the same examples, a short answer (as MMLU).
- `chat`: conversations of several turns about a text each, with short answers.
- `tree`: a tree of thoughts: every thought is continued in several ways, level by level.

The same requests go to two engines that differ in `enable_prefix_caching` alone. Answers are
greedy and must be equal to the token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from claims_texts import ENDS, EXAMPLES, FOLLOW_UPS, PROBLEM, QUESTIONS, TOPICS, passage

from octavo.serve import Branch, Engine, SamplingParams, generate_together

Answers = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is asked.

    Attributes:
        num_questions: of `few-shot`.
        num_conversations, num_turns, passage_tokens, turn_tokens: of `chat`.
        num_levels, num_branches, thought_tokens: of `tree`.
    """

    num_questions: int = 12
    num_conversations: int = 4
    num_turns: int = 4
    passage_tokens: int = 160
    turn_tokens: int = 8
    num_levels: int = 3
    num_branches: int = 2
    thought_tokens: int = 8


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def few_shot(engine: Engine, sizes: Sizes) -> Answers:
    """All questions at once; the answer is a letter."""
    examples = "\n\n".join(f"{asked}\nAnswer: {answer}" for asked, answer in EXAMPLES)
    prompts = [
        f"Multiple choice questions, with answers.\n\n{examples}\n\n{asked}\nAnswer:"
        for asked in QUESTIONS[: sizes.num_questions]
    ]
    return [answer.token_ids for answer in engine.generate(prompts, greedy(1))]


def chat(engine: Engine, sizes: Sizes) -> Answers:
    """All conversations side by side, turn by turn."""
    template, tokenizer = engine.loaded.chat_template, engine.loaded.tokenizer
    assert template is not None
    talks = [
        [{"role": "user", "content": passage(tokenizer, i, sizes.passage_tokens) + ENDS[i]}]
        for i in range(sizes.num_conversations)
    ]
    answers: Answers = []
    for turn in range(sizes.num_turns):
        prompts = [
            tokenizer.encode(template.render(talk), add_special_tokens=False) for talk in talks
        ]
        for talk, answer in zip(
            talks, engine.generate(prompts, greedy(sizes.turn_tokens)), strict=True
        ):
            answers.append(answer.token_ids)
            talk.append({"role": "assistant", "content": answer.text})
            talk.append({"role": "user", "content": FOLLOW_UPS[turn % len(FOLLOW_UPS)]})
    return answers


def tree(engine: Engine, sizes: Sizes) -> Answers:
    """Every thought forks into several, each told to go another way."""
    answers: Answers = []
    level: list[Branch] = [engine.sequence(PROBLEM)]
    for _ in range(sizes.num_levels):
        children = []
        for parent in level:
            for i in range(sizes.num_branches):
                children.append(parent.fork().append(TOPICS[i]))
            parent.release()
        for answer in generate_together(children, greedy(sizes.thought_tokens)):
            answers.append(answer.token_ids)
        level = children
    for branch in level:
        branch.release()
    return answers


WORKLOADS: dict[str, Callable[[Engine, Sizes], Answers]] = {
    "few-shot": few_shot,
    "chat": chat,
    "tree": tree,
}


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What one workload came to; seconds are medians.

    Attributes:
        num_requests: answers.
        seconds_off, seconds_on: without and with reuse.
        hit_rate: prompt tokens found in the cache, over all, with reuse.
        computed_off, computed_on: prompt tokens computed.
        equal: whether all answers are the same.
    """

    num_requests: int
    seconds_off: float
    seconds_on: float
    hit_rate: float
    computed_off: int
    computed_on: int
    equal: bool

    @property
    def speedup(self) -> float:
        return self.seconds_off / self.seconds_on


@dataclass(frozen=True, kw_only=True)
class _Run:
    answers: Answers
    seconds: float
    num_prompt: int
    num_cached: int
    num_computed: int


def run(engine: Engine, workload: Callable[[Engine, Sizes], Answers], sizes: Sizes) -> _Run:
    """One workload from an empty cache."""
    engine.reset_cache()
    before, begin = engine.stats(), time.perf_counter()
    answers = workload(engine, sizes)
    seconds, after = time.perf_counter() - begin, engine.stats()
    return _Run(
        answers=answers,
        seconds=seconds,
        num_prompt=after.prompt_tokens - before.prompt_tokens,
        num_cached=after.prefix_hit_tokens - before.prefix_hit_tokens,
        num_computed=after.prefilled_tokens - before.prefilled_tokens,
    )


def measure_reuse(off: Engine, on: Engine, sizes: Sizes, repeats: int) -> dict[str, Reuse]:
    """Every workload on an engine without reuse and on one with it, in turns."""
    found = {}
    for name, workload in WORKLOADS.items():
        pairs = [(run(off, workload, sizes), run(on, workload, sizes)) for _ in range(repeats)]
        plain, cached = zip(*pairs, strict=True)
        found[name] = Reuse(
            num_requests=len(plain[0].answers),
            seconds_off=median(r.seconds for r in plain),
            seconds_on=median(r.seconds for r in cached),
            hit_rate=cached[0].num_cached / cached[0].num_prompt,
            computed_off=plain[0].num_computed,
            computed_on=cached[0].num_computed,
            equal=all(r.answers == plain[0].answers for r in (*plain, *cached)),
        )
    return found
