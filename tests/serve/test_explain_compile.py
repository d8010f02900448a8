"""The list of compiled programs is whole, says why, and knows what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from typer.testing import CliRunner

from octavo.models import LoadedModel
from octavo.serve import Engine, cli
from octavo.serve.explain_compile import ProgramReport

from .tiny import tiny_engine, tiny_model

# Thirteen programs of the block manager and the like, and few of the model.
SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_loras": 1}
SMALL |= {"scheduling_policy": "lpm", "num_speculative_tokens": 2}


@pytest.fixture
def kept_programs(tmp_path: Path) -> Iterator[None]:
    """A folder of compiled programs that is empty at first."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}

    def use(values: dict) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    jax.clear_caches()  # what other tests have compiled would not be written
    use(dict(zip(names, (str(tmp_path), 0.0), strict=True)))
    yield
    use(before)


@pytest.mark.slow
def test_each_program_is_listed_with_its_reason_and_whether_it_was_kept(
    smollm2: LoadedModel, kept_programs: None
) -> None:
    tiny = tiny_model(smollm2)
    engine = tiny_engine(tiny, **SMALL)
    first = list(engine.explain_compile())
    assert len(first) == len(engine._runner.warmups()) == engine.num_programs
    sizes = {report.name: report.size for report in first}
    assert (sizes["packed step"], sizes["decode loop"]) == ("16 tokens", "1 sequences")
    assert len(sizes) == len(first) and all(report.why for report in first)
    assert not any(report.was_kept for report in first)
    jax.clear_caches()
    again = list(tiny_engine(tiny, **SMALL).explain_compile())
    assert all(report.was_kept for report in again)
    assert [report.name for report in again] == [report.name for report in first]


def test_the_command_prints_them_and_does_not_serve(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [
        ProgramReport(name="packed step", size="16 tokens", why="a", seconds=1.5, was_kept=False),
        ProgramReport(name="stats", size="", why="b", seconds=0.25, was_kept=True),
    ]
    monkeypatch.setattr(cli, "load_model", lambda *_, **__: tiny_model(smollm2))
    monkeypatch.setattr(Engine, "explain_compile", lambda _: iter(reports))
    options = ["--num-blocks", "32", "--max-num-seqs", "1"]
    result = CliRunner().invoke(cli.app, ["serve", "tiny", "--explain-compile", *options])
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["packed", "step", "16", "tokens", "compiled", "1.50", "s", "a"],
        ["stats", "loaded", "0.25", "s", "b"],
        ["2", "programs,", "1.8", "s;", "serving", "compiles", "no", "others"],
    ]
