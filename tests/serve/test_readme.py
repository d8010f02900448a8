"""The README's Python runs as written, against the real model and the real server."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def snippet_with(text: str) -> str:
    found = [snippet for snippet in SNIPPETS if text in snippet]
    assert len(found) == 1, f"{len(found)} snippets of the README contain {text!r}"
    return found[0]


def test_the_client_example_hits_the_cache(server, capsys: pytest.CaptureFixture[str]) -> None:
    code = snippet_with("OpenAI(").replace("http://127.0.0.1:8000", server.url)
    exec(code, {})
    first, second = (list(map(int, line.split())) for line in capsys.readouterr().out.splitlines())
    assert first[1] < 100 < 1600 < second[1] < second[0]


@pytest.mark.slow
def test_the_engine_example_prints_answers(smollm2, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict = {}
    exec(snippet_with("Engine("), names)
    out = capsys.readouterr().out
    assert out.startswith("0 ") and len(out) > 60
    exec(snippet_with("engine.sequence("), names)
    # The prompt and eight tokens, of which the newest is not computed before it goes on.
    assert int(capsys.readouterr().out) >= 8 + 8


def test_the_attention_example_is_attention() -> None:
    import jax.numpy as jnp

    from octavo.paged import packed_batch

    tables, lens = jnp.array([[1]], jnp.int32), jnp.array([2], jnp.int32)
    batch, _ = packed_batch(tables, lens, lens, num_tokens=2, block_size=16)
    names = {
        "kv_cache": jnp.zeros((4, 1, 16, 16)),
        "k": jnp.ones((2, 1, 8)),
        "v": jnp.ones((2, 1, 8)),
        "q": jnp.ones((2, 2, 8)),
        "batch": batch,
    }
    exec(snippet_with("cached_attention("), names)
    assert names["out"].shape == (2, 2, 8)
    assert bool(jnp.allclose(names["out"], 1.0))


@pytest.mark.slow
def test_the_interpreted_kernels_of_the_readme_run() -> None:
    names: dict = {}
    exec(snippet_with("interpret_kernels("), names)
    np.testing.assert_allclose(names["out"], 1.0, rtol=1e-6)


def test_the_block_manager_example_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = snippet_with("BlockManager(")
    exec(code, {})
    said = README.split(code)[1].split("```text\n")[1].split("```")[0]
    assert capsys.readouterr().out == said
