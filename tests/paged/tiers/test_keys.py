"""Keys of blocks below the device: equal for equal causes, and for no others."""

from __future__ import annotations

import doctest
from dataclasses import fields, replace

import numpy as np
import pytest

from octavo.paged import NamespaceKey
from octavo.paged.tiers import further_keys, root_key
from octavo.paged.tiers import keys as keys_module

KEY = NamespaceKey(model="m", cache_dtype="float32", adapter="a", adapter_version="1", salt="s")
TOKENS = np.arange(12, dtype=np.int32)


def keys(
    tokens: np.ndarray = TOKENS, namespace=KEY, payload="p", salt=b"", block_size=4
) -> list[bytes]:
    return further_keys([], root_key(namespace, payload, salt), np.asarray(tokens), block_size)


@pytest.mark.parametrize("field", [field.name for field in fields(NamespaceKey)])
def test_any_field_of_the_namespace_changes_every_key(field):
    other = replace(KEY, **{field: getattr(KEY, field) + "x"})
    assert not set(keys()) & set(keys(namespace=other))


def test_payload_and_salt_change_every_key():
    assert not set(keys()) & set(keys(payload="q"))
    assert not set(keys()) & set(keys(salt=b"x"))


def test_fields_that_join_to_one_string_are_different_namespaces():
    moved = replace(KEY, adapter="a1", adapter_version="")
    assert not set(keys()) & set(keys(namespace=moved))
    assert root_key(KEY, "p", b"q") != root_key(KEY, "pq", b"")


def test_a_token_changes_its_block_and_all_after_it():
    for place in range(12):
        tokens = TOKENS.copy()
        tokens[place] += 1
        same = [a == b for a, b in zip(keys(), keys(tokens), strict=True)]
        assert same == [i < place // 4 for i in range(3)]


def test_only_full_blocks_have_keys_and_a_prefix_has_the_first_of_them():
    assert keys(TOKENS[:3]) == []
    assert keys(TOKENS[:11]) == keys()[:2]
    assert len(set(keys(np.zeros(12, np.int32)))) == 3  # equal tokens at another depth


def test_keys_extend_those_there_are():
    root, known = root_key(KEY, "p"), keys(TOKENS[:4])
    assert further_keys(known, root, TOKENS, 4) == keys()[1:]
    assert further_keys(keys(), root, TOKENS, 4) == []


def test_keys_do_not_depend_on_the_machines_integers():
    assert keys(TOKENS.astype(np.int64)) == keys(TOKENS.astype(">i4")) == keys()


def test_the_example_runs():
    names = {"np": np, "NamespaceKey": NamespaceKey}
    result = doctest.testmod(keys_module, extraglobs=names)
    assert result.attempted and not result.failed
