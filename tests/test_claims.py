"""The harness of the classic claims: its arithmetic by hand, and a whole run on a small model."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import claims
import numpy as np
import pytest
from claims_table import as_markdown
from claims_waste import BLOCK_SIZE, Buddies, Job, run_contiguous, run_paged

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, str]:
    """The output, figures and table of a quick run."""
    folder = tmp_path_factory.mktemp("claims")
    done = subprocess.run(
        [sys.executable, "benchmarks/claims.py", "--quick", "--out", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads((folder / "claims.json").read_text())
    return done.stdout, figures, (folder / "claims.md").read_text()


@pytest.mark.slow
def test_every_claim_holds_on_a_small_model_and_stands_beside_the_published_one(quick):
    out, figures, table = quick
    assert out == table + "\n"
    assert all(row["equal"] for row in figures["reuse"].values())
    assert figures["reuse"].keys() == {"few-shot", "chat", "tree"}
    assert figures["about"]["versions"].keys() >= {"octavo", "jax"}
    for published in ("| 20.4% |", "| 96.3% |", "| 6.1% to 9.8% |", "| 37.6% to 55.2% |", "6.4×"):
        assert published in table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f["reuse"]["chat"].update(equal=False), "chat: answers differ"),
        (lambda f: f["reuse"]["tree"].update(hit_rate=0.1), "tree: a hit rate of 0.10"),
        (lambda f: f["waste"]["shares"]["oracle"].update(used=0.9), "used shares are"),
        (lambda f: f["waste"]["shares"]["paged"].update(internal=0.05), "waste 5.0%"),
        (
            lambda f: f["sharing"]["instructions"].update(
                {"parallel sampling": f["sharing"]["instructions"]["beam search"]}
            ),
            "beams should share more",
        ),
        (
            lambda f: f["sharing"]["instructions"].update({"beam search": {"2": 0.5, "3": 0.4}}),
            "should grow",
        ),
    ],
)
def test_a_claim_that_does_not_hold_is_a_fault(quick, change, words: str):
    _, figures, _ = quick
    assert claims.faults(figures) == []
    broken = copy.deepcopy(figures)
    change(broken)
    (fault,) = claims.faults(broken)
    assert words in fault


def test_the_shares_are_those_worked_out_by_hand():
    # A pool for two; the third waits until the first two have made their two tokens.
    jobs = [Job(prompt=30, output=2), Job(prompt=20, output=2), Job(prompt=1, output=1)]
    found = run_contiguous(jobs, 64, lambda job: 32)
    steps = np.array([[50, 4, 10, 0], [52, 2, 10, 0]]) / 64
    names = ("used", "reserved", "internal", "external")
    assert [found[name] for name in names] == pytest.approx(steps.mean(0))
    assert found["mean_batch"] == 2
    # Exactly what is needed, in pieces of 32: the rest is nobody's.
    found = run_contiguous(jobs, 64, lambda job: job.total)
    steps = np.array([[50, 4, 0, 10], [52, 2, 0, 10]]) / 64
    assert [found[name] for name in names] == pytest.approx(steps.mean(0))


def test_paged_requests_share_the_pool_and_the_youngest_gives_way():
    # Four blocks. Both fit with two each; at 33 tokens the first wants a third and the second, at
    # 33 too, gives way, and comes back when the first has ended.
    jobs = [Job(prompt=31, output=4), Job(prompt=31, output=4), Job(prompt=1, output=1)]
    found = run_paged(jobs, 4 * BLOCK_SIZE)
    # While somebody waits: 31 and 32 tokens of both, then 33 and 34 of the first alone.
    assert found["used"] == pytest.approx(np.mean([62, 64, 33, 34]) / 64)
    assert found["internal"] == pytest.approx(np.mean([2, 0, 15, 14]) / 64)


def test_pieces_never_overlap_and_all_is_one_again_when_they_are_given_back():
    rng = np.random.default_rng(0)
    pool, taken = Buddies(256), []
    for _ in range(500):
        if taken and rng.random() < 0.5:
            pool.give_back(*taken.pop(int(rng.integers(len(taken)))))
        elif piece := pool.take(wanted := int(rng.integers(1, 65))):
            assert piece[1] >= wanted and piece[1] < 2 * wanted
            taken.append(piece)
        spans = sorted((offset, offset + size) for offset, size in taken)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= 256
    for piece in taken:
        pool.give_back(*piece)
    assert pool.take(256) == (0, 256) and pool.take(1) is None


@pytest.mark.slow
def test_the_table_holds_only_what_was_measured(quick):
    _, figures, _ = quick
    table = as_markdown(figures["about"], {"waste": figures["waste"]})
    assert "holds tokens" in table and "speed-up" not in table
