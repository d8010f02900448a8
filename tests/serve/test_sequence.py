"""Sequences that stay: forks share and copy nothing, held blocks stay and yet give way."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from octavo.models import LoadedModel
from octavo.serve import Engine, InvalidRequest, SamplingParams, generate_together

from .tiny import tiny_engine, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(smollm2: LoadedModel) -> Engine:
    # Room for two of the longest texts below and little more.
    return tiny_engine(tiny_model(smollm2), num_blocks=40, max_num_seqs=4)


@pytest.fixture(scope="module")
def plain(smollm2: LoadedModel) -> Engine:
    return tiny_engine(tiny_model(smollm2), enable_prefix_caching=False)


@pytest.fixture(autouse=True)
def nothing_is_left(engine: Engine):
    yield
    gc.collect()
    engine._runner.spare_rows.sweep()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_active_blocks) == (0, 0, 0)
    engine.check_invariants()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49152, length).tolist()


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1, seed=seed, max_tokens=12, ignore_eos=True)


def active(engine: Engine) -> int:
    engine.check_invariants()
    return engine.stats().num_active_blocks


@pytest.mark.slow
def test_a_sequence_goes_on_where_it_stopped(engine: Engine, plain: Engine) -> None:
    with engine.sequence(prompt(1, 43)) as root:
        first = root.generate(GREEDY)
        more = root.append(prompt(2, 9)).generate(sampled(5))
        assert more.num_cached_tokens == 43 + 11  # the newest token is not computed before
        text = prompt(1, 43)
        assert first.token_ids == plain.generate(text, GREEDY)[0].token_ids
        text += [*first.token_ids, *prompt(2, 9)]
        assert more.token_ids == plain.generate(text, sampled(5))[0].token_ids
        assert root.token_ids == (*text, *more.token_ids)
        assert root.text == engine.loaded.tokenizer.decode(root.token_ids)


def test_a_fork_copies_nothing_until_it_is_written(engine: Engine, plain: Engine) -> None:
    root = engine.sequence(prompt(3, 43))
    forks = [root.fork() for _ in range(3)]
    assert active(engine) == 6
    before = engine.stats().prefilled_tokens
    answers = generate_together(forks, [sampled(i) for i in range(3)])
    assert engine.stats().prefilled_tokens - before == 3  # one each, for its logits
    # 54 tokens: five blocks of the prompt once, of each fork two of its own, and the root's tail.
    assert active(engine) == 5 + 3 * 2 + 1
    for i, answer in enumerate(answers):
        assert answer.token_ids == plain.generate(prompt(3, 43), sampled(i))[0].token_ids
    for fork in forks[:2]:
        fork.release()
    assert active(engine) == 5 + 2 + 1
    grandchild = forks[2].fork()
    answer = grandchild.generate(GREEDY)
    text = [*prompt(3, 43), *answers[2].token_ids]
    assert answer.token_ids == plain.generate(text, GREEDY)[0].token_ids
    assert forks[2].token_ids == tuple(text)


def test_a_held_sequence_survives_what_would_evict_it(engine: Engine) -> None:
    held = engine.sequence(prompt(4, 60))
    held.generate(GREEDY)
    gone = engine.generate(prompt(5, 60), GREEDY)[0]
    for i in range(6):
        engine.generate(prompt(30 + i, 100), GREEDY)
    assert held.generate(GREEDY).num_cached_tokens == 71
    again = engine.generate([*prompt(5, 60), *gone.token_ids], GREEDY)[0]
    assert again.num_cached_tokens < 71
    held.release()


def test_held_sequences_give_way_and_come_back(engine: Engine, plain: Engine) -> None:
    kept = [engine.sequence(prompt(40 + i, 80)) for i in range(3)]
    first = [sequence.generate(GREEDY) for sequence in kept]
    assert active(engine) >= 3 * 12
    # It needs all but one of the pool's 39 blocks.
    large = engine.generate(prompt(50, 290), GREEDY)[0]
    assert len(large.token_ids) == 12
    assert active(engine) == 0
    second = generate_together(kept, GREEDY)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        text = [*prompt(40 + i, 80), *a.token_ids]
        assert b.token_ids == plain.generate(text, GREEDY)[0].token_ids


def test_more_sequences_than_rows_are_kept_as_text(engine: Engine, plain: Engine) -> None:
    kept = [engine.sequence(prompt(60 + i, 10)) for i in range(9)]
    first = [sequence.generate(GREEDY) for sequence in kept]
    assert active(engine) == 4 * 3
    # The one let go first has lost nothing but the guarantee.
    text = [*prompt(60, 10), *first[0].token_ids]
    want = plain.generate(text, GREEDY)[0].token_ids
    assert kept[0].generate(GREEDY).token_ids == want


def test_a_fork_for_which_there_is_no_row_does_not_end_what_it_forks(smollm2: LoadedModel) -> None:
    engine = tiny_engine(tiny_model(smollm2), max_num_seqs=1)
    root = engine.sequence(prompt(80, 30))
    first = root.generate(GREEDY)
    held = active(engine)
    fork = root.fork()
    assert active(engine) == held > 0 and root._held().row is not None
    assert fork.generate(GREEDY).num_cached_tokens == 30 + len(first.token_ids) - 1
    # With two rows the older of two is forked, and stays, though it was next to go.
    other = tiny_engine(tiny_model(smollm2), max_num_seqs=2)
    older, younger = (other.sequence(prompt(80 + i, 30)) for i in range(2))
    older.generate(GREEDY)
    younger.generate(GREEDY)
    fork = older.fork()
    rows = [one._held().row is not None for one in (older, younger, fork)]
    assert rows == [True, False, True]
    other.check_invariants()


def test_an_aborted_stream_leaves_a_sequence_that_goes_on(engine: Engine, plain: Engine) -> None:
    sequence = engine.sequence(prompt(70, 20))
    stream = sequence.stream(SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    for _ in range(2):
        next(stream)
    stream.close()
    text = sequence.token_ids
    assert 20 < len(text) < 220
    want = plain.generate(list(text), GREEDY)[0]
    assert sequence.generate(GREEDY).token_ids == want.token_ids


def test_sequences_work_without_a_cache(plain: Engine) -> None:
    root = plain.sequence(prompt(80, 20))
    answers = generate_together([root.fork(), root.fork()], [sampled(1), sampled(2)])
    want = [plain.generate(prompt(80, 20), sampled(i))[0].token_ids for i in (1, 2)]
    assert [a.token_ids for a in answers] == want
    assert plain.stats().num_active_blocks == 0


def test_what_cannot_be_done_is_refused_and_changes_nothing(engine: Engine, plain: Engine) -> None:
    sequence = engine.sequence(prompt(90, 20))
    before = sequence.token_ids
    with pytest.raises(InvalidRequest, match="fork the sequence"):
        sequence.generate(SamplingParams(n=2))
    with pytest.raises(InvalidRequest, match="512"):
        sequence.append([1] * 492)
    with pytest.raises(InvalidRequest, match="-1"):
        sequence.append([-1])
    with pytest.raises(InvalidRequest, match="max_tokens"):
        generate_together([sequence.fork(), sequence], [GREEDY, SamplingParams(max_tokens=5000)])
    with pytest.raises(ValueError, match="stands twice"):
        generate_together([sequence, sequence], GREEDY)
    with pytest.raises(ValueError, match="different engines"):
        generate_together([sequence, plain.sequence([1])], GREEDY)
    with pytest.raises(ValueError, match="1 sampling params for 2"):
        generate_together([sequence, sequence.fork()], [GREEDY])
    assert generate_together([], GREEDY) == []
    assert sequence.token_ids == before
    sequence.release()
    sequence.release()
    for act in (sequence.fork, sequence.generate, lambda: sequence.append([1])):
        with pytest.raises(ValueError, match="released"):
            act()
