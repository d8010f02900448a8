"""What random runs found to be wrong, each as the shortest story that shows it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import paged

from .machine import LARGEST, SMALLEST, Manager, jitted, machine
from .model import Entry

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture
def manager() -> Manager:
    """One that is checked against the model at every operation."""
    manager = machine("lru", 4)()
    manager.begin(False, [])
    return manager


def serve(manager: Manager, seat: int, tokens: list[int], namespace: int = 0) -> None:
    assert manager.begin_sequence(seat, tokens, namespace)
    manager.write(seat, len(tokens))


def test_a_block_is_never_found_after_another_than_its_holders_hold(manager: Manager) -> None:
    serve(manager, 0, [1, 2, 0, 0, 1, 1])
    manager.share([0], [1], [True])
    serve(manager, 2, [1, 2, 0, 0])
    manager.publish_entries(manager.entries([(2, 0, 4)]))
    # Folds the first block of 1 into that of 2; the second is held by 0 as well.
    manager.publish_entries(manager.entries([(1, 0, 4), (1, 1, 4)]))
    manager.release_rows([2, 1], [True, True])
    manager.means_the_same()
    # The parent is evicted, its id is taken by another prefix, and that finds the child's tokens.
    manager.make_room(manager.model.num_free + 1)
    serve(manager, 1, [2, 2, 2, 2])
    manager.publish_entries(manager.entries([(1, 0, 4)]))
    assert manager.begin_sequence(2, [2, 2, 2, 2, 1, 1, 0], 0)
    assert manager.model.seqs[2].written == 4


def test_a_block_published_at_two_lengths_at_once_is_refused(manager: Manager) -> None:
    serve(manager, 0, [1, 2])
    manager.share([0], [1], [True])
    manager.publish_entries(manager.entries([(0, 0, 1), (1, 0, 2)]))
    manager.means_the_same()


def test_a_full_block_named_again_by_fewer_tokens_is_still_the_parent(manager: Manager) -> None:
    serve(manager, 0, [1, 2, 0, 0, 1, 1, 1, 1])
    manager.publish_entries(manager.entries([(0, 0, 4)]))
    manager.publish_entries(manager.entries([(0, 0, 2), (0, 1, 4)]))
    manager.means_the_same()
    assert len(manager.model.cached) == 2


def test_a_full_block_named_again_by_fewer_tokens_leaves_that_name_to_others(
    manager: Manager,
) -> None:
    serve(manager, 0, [1, 2, 0, 0])
    manager.publish_entries(manager.entries([(0, 0, 4)]))
    serve(manager, 1, [1, 2])
    manager.publish_entries(manager.entries([(0, 0, 2), (1, 0, 2)]))
    manager.means_the_same()
    assert sorted(manager.model.cached) == [(0, (1, 2)), (0, (1, 2, 0, 0))]


@pytest.mark.parametrize("together", [False, True])
def test_a_block_in_another_namespace_than_its_parent_is_refused(
    manager: Manager, together: bool
) -> None:
    serve(manager, 0, [1, 2, 0, 0, 1, 1, 1, 1])
    first, second = manager.entries([(0, 0, 4), (0, 1, 4)])
    stray = Entry(second.seat, second.column, second.num_tokens, second.tokens, 1)
    if not together:
        manager.publish_entries([first])
    manager.publish_entries([first, stray] if together else [stray])
    manager.means_the_same()
    assert len(manager.model.cached) == (0 if together else 1)


def test_who_writes_again_what_others_are_found_after_has_to_truncate_first(
    manager: Manager,
) -> None:
    serve(manager, 0, [1, 2, 0, 0, 1, 1, 1, 1])
    manager.publish_entries(manager.entries([(0, 0, 4), (0, 1, 4)]))
    assert not manager.own([0], [2], [True])
    manager.keep([0], [2], [True])
    assert manager.own([0], [2], [True])
    manager.means_the_same()


def test_a_namespace_out_of_range_is_not_counted_as_another(manager: Manager) -> None:
    serve(manager, 0, [1, 2, 0, 0], namespace=-1)
    manager.publish_entries(manager.entries([(0, 0, 4)]))
    assert np.asarray(paged.namespace_use(manager.state, 3)).tolist() == [0, 0, 0]


def test_a_pin_that_is_over_before_it_begins_pins_nothing(manager: Manager) -> None:
    serve(manager, 0, [1, 2, 0, 0])
    manager.publish_entries(manager.entries([(0, 0, 4)]))
    _, count, ok = jitted.pin_namespace(manager.state, 0, 0)
    assert ok and int(count) == 0


@pytest.mark.parametrize(("count", "enough"), [(SMALLEST, True), (LARGEST, False)])
def test_room_for_any_number_is_judged_without_overflow(
    manager: Manager, count: int, enough: bool
) -> None:
    _, ok = jitted.reserve(manager.state, count)
    assert bool(ok) == enough
