"""A second start neither traces nor compiles; what does not load or fit is never run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from octavo.models import Llama, LoadedModel
from octavo.serve import Engine, SamplingParams, program_store
from octavo.serve.config import EngineConfig
from octavo.serve.kept_programs import keep_compiled_programs
from octavo.serve.program import Program
from octavo.serve.program_store import ProgramStore

from .tiny import tiny_engine

SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def no_jax_cache() -> Iterator[None]:
    """Whole programs are kept only where JAX's own cache is not used."""
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()  # of what has been loaded from there before
    yield
    jax.config.update("jax_compilation_cache_dir", chosen)
    compilation_cache.reset_cache()


def answer(engine: Engine) -> list[int]:
    return list(engine.generate([[5, 6, 7, 8] * 5], GREEDY)[0].token_ids)


@pytest.mark.slow
def test_a_second_start_loads_every_program_whole_and_answers_alike(
    tiny: LoadedModel, tmp_path: Path, no_jax_cache: None
) -> None:
    folder = str(tmp_path / "not" / "there")
    first = tiny_engine(tiny, compilation_cache_dir=folder, **SMALL)
    expected = answer(first)
    count = first.num_programs
    assert first._runner.num_loaded == 0 and count > 5

    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compiled.append(event)

    again = tiny_engine(tiny, compilation_cache_dir=folder, max_waiting=7, **SMALL)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert answer(again) == expected
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    assert again._runner.num_loaded == again.num_programs == count
    again.check_invariants()
    third = tiny_engine(tiny, compilation_cache_dir=folder, **SMALL)
    assert next(third.explain_compile()).was_kept

    # Every setting that may be part of a program leads elsewhere.
    other = tiny_engine(tiny, compilation_cache_dir=folder, **SMALL | {"max_decode_steps": 3})
    name, compile_it = other._runner.warmups()[-1]
    compile_it()
    assert name == "copy tails" and other.num_programs == 1 and other._runner.num_loaded == 0


@pytest.mark.slow
def test_weights_of_the_same_shapes_that_are_multiplied_otherwise_find_nothing(
    tiny: LoadedModel, tmp_path: Path, no_jax_cache: None
) -> None:
    folder = str(tmp_path)
    for quantization in ("int8", "w8a8"):
        model = replace(tiny, model=tiny.model.quantized(quantization))
        engine = tiny_engine(model, compilation_cache_dir=folder, **SMALL)
        engine.warmup()
        assert engine.num_programs > 5 and engine._runner.num_loaded == 0


def _double(x: jax.Array, y: jax.Array) -> dict[str, jax.Array | None]:
    return {"z": 2 * x + y, "none": None}


def programs(store: ProgramStore | None) -> Program:
    program = Program("double it", _double, donate=(0,))
    program.keep_in(store)
    return program


def run(program: Program, dtype: str = "float32") -> float:
    size = 4
    return float(program(size, jnp.ones(size, dtype), np.ones(size, dtype))["z"].sum())


def test_a_kept_program_gives_back_its_structure_and_takes_its_donations(
    tmp_path: Path, no_jax_cache: None
) -> None:
    assert run(programs(ProgramStore(tmp_path))) == 12.0
    loaded = programs(ProgramStore(tmp_path))
    given = jnp.ones(4)
    out = loaded(4, given, np.ones(4, np.float32))
    assert out["none"] is None and given.is_deleted()
    assert loaded.num_loaded == loaded.num_sizes == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder", "pickle"])
def test_what_does_not_load_is_compiled_and_the_log_says_so(
    damage: str, tmp_path: Path, no_jax_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    run(programs(ProgramStore(tmp_path)))
    (path,) = tmp_path.glob("*/*.program")
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "pickle":  # sound, and not what was expected
        body = program_store.zlib.compress(program_store.pickle.dumps((b"no program", 0)))
        path.write_bytes(program_store.hashlib.sha256(body).digest() + body)
    else:
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        path.write_bytes({"cut": data[:-9], "flipped": flipped, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        again = programs(ProgramStore(tmp_path))
        assert run(again) == 12.0
    assert (again.num_sizes, again.num_loaded) == (1, 0)
    assert "compiling instead" in caplog.text
    if damage != "folder":  # what was written anew is whole
        third = programs(ProgramStore(tmp_path))
        assert run(third) == 12.0 and third.num_loaded == 1


def test_other_arguments_names_settings_or_surroundings_find_nothing(
    tmp_path: Path, no_jax_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_loaded(*settings: object, dtype: str = "float32") -> int:
        program = programs(ProgramStore(tmp_path, *settings))
        run(program, dtype)
        return program.num_loaded

    monkeypatch.setattr(program_store, "_MOST_SETS", 99)
    assert num_loaded("a") == 0 and num_loaded("a") == 1
    assert num_loaded("a", dtype="int32") == 0
    assert num_loaded("b") == 0 and num_loaded("a", "b") == 0
    with jax.default_matmul_precision("bfloat16"):
        assert num_loaded("a") == 0
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        assert num_loaded("a") == 0
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert num_loaded("a") == 0
    for name in ("version", "_cpu_features", "_code_digest", "_num_usable_cpus"):
        with monkeypatch.context() as patch:
            patch.setattr(program_store, name, lambda *_: "another")
            assert num_loaded("a") == 0, name
    assert num_loaded("a") == 1


def test_the_digest_of_the_code_sees_every_file(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    digests = set()
    for name, text in (("a.py", "1"), ("inner/a.py", "1"), ("inner/a.py", "2"), ("b.json", "")):
        (tmp_path / name).write_text(text)
        digests.add(program_store._code_digest(tmp_path))
    assert len(digests) == 4


def test_the_oldest_sets_of_programs_make_room(tmp_path: Path, no_jax_cache: None) -> None:
    most = program_store._MOST_SETS
    for i in range(most):
        run(programs(ProgramStore(tmp_path, i)))
        (folder,) = {p for p in tmp_path.iterdir() if p.stat().st_mtime > most}
        program_store.os.utime(folder, (i, i))
    ProgramStore(tmp_path, 0)  # used again
    for i in range(most, most + 2):
        run(programs(ProgramStore(tmp_path, i)))
    assert len(list(tmp_path.iterdir())) == most
    oldest = programs(ProgramStore(tmp_path, 0))
    run(oldest)
    assert oldest.num_loaded == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, no_jax_cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert run(programs(ProgramStore(tmp_path / "file"))) == 12.0
    assert "not kept" in caplog.text


class OwnLlama(Llama):
    """Somebody's own model, whose code no key knows."""


def test_jax_cache_is_left_alone_and_takes_the_programs_of_others_models(
    tiny: LoadedModel, tmp_path: Path, no_jax_cache: None
) -> None:
    config = EngineConfig(compilation_cache_dir=str(tmp_path))
    assert keep_compiled_programs(config, tiny.model) is not None
    assert keep_compiled_programs(replace(config, compilation_cache_dir=""), tiny.model) is None
    store = ProgramStore(tmp_path)
    own = OwnLlama(replace(tiny.config, vocab_size=64), rngs=nnx.Rngs(0))
    assert keep_compiled_programs(config, own) is None
    assert program_store.jax_cache() == str(tmp_path)
    assert keep_compiled_programs(config, tiny.model) is None
    run(programs(store))  # JAX's cache may have loaded it
    assert not list(tmp_path.glob("*/*.program"))
