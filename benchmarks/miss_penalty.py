"""What a prefix costs to miss, to restore and to hit, from 1K to 128K tokens: measured, predicted.

    python benchmarks/miss_penalty.py [--longest 131072] [--repeats 3] [--remote-cache-url URL] \
        [--json FILE] [--table FILE] [--plot FILE]

A small Llama with random weights in the engine as it is served: every length is a prompt of so many
tokens and `NEW` more, and its time is that to the first token. Cold: nothing is cached. Hit: the
prefix is on the device. Host, disk, remote: the device is empty and the prefix lies in that tier
alone, on disk for an engine that has just started and with the system's cache of the files dropped.
In every state the cold prompt is asked again as well, and must be answered with the same tokens.

Predictions are the cost model's, calibrated in seconds as an engine does at its start, and then
fitted to what shorter lengths took, as an engine learns; those above `FITTED` are predicted before
they are measured. FLOP/s of a cold prefill are set beside the best product of a chunk's shape in
the same minute. Exits with 1 if an answer differs or a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from miss_penalty_report import missed, plot, table

from octavo.models import Llama, LlamaConfig, LoadedModel, load_model
from octavo.paged.cost_model import (
    CostModel,
    ModelShape,
    calibrate,
    fit_hits,
    fit_prefill,
    fit_restore,
    plan_restore,
    prefill_flops,
)
from octavo.paged.cost_model.calibration import median_seconds
from octavo.serve import Engine, EngineConfig, SamplingParams
from octavo.serve.model_shape import shape_of

NEW, ANSWER, BLOCK = 32, 8, 16
FITTED = 4096  # up to this, lengths only teach
MODES = ("hit", "host", "disk", "remote")
# Times that a state is measured in each repeat, if it takes a new engine and if it does not.
SLOW, QUICK = 3, 7


def small_llama(longest: int, *, layers: int, heads: int, kv_heads: int, width: int) -> LoadedModel:
    """A Llama with heads as those of Llama 3.1, and few of everything."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=width // heads,
        max_context_len=longest + 256,
        tie_embeddings=True,
    )
    model = Llama(config, rngs=nnx.Rngs(0))
    for layer in model.layers:  # so that what comes next depends on what was before
        layer.out[...] = layer.out[...] * 20
        layer.down[...] = layer.down[...] * 20
    loaded = load_model("smollm2")  # its tokenizer
    return replace(loaded, name="small", model=model, config=config, fingerprint="small")


class Bench:
    """The engines, and the state that a measurement needs.

    Args:
        loaded: the model.
        longest: tokens of the longest prefix.
        chunk: prompt tokens of a step.
        folder: of the disk tier.
        remote: URL of a server, or nothing.
    """

    def __init__(self, loaded: LoadedModel, longest: int, chunk: int, folder: Path, remote: str):
        self.loaded, self.chunk, self.folder, self.remote = loaded, chunk, folder, remote
        self._longest = longest
        self._rng = np.random.default_rng(0)
        block_bytes = self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_size * 8
        self._host_gib = 2 * (longest + 1024) * block_bytes / 2**30
        self.engine = self.new_engine(host_cache_gib=self._host_gib, **self._disk(), **self._far())
        self.engine.warmup()

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.loaded.config, param_dtype_bytes=4, kv_dtype_bytes=4)

    def new_engine(self, **tiers: Any) -> Engine:
        config = EngineConfig(
            num_blocks=self._longest // BLOCK + 64,
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=self.chunk,
            max_decode_steps=8,
            restore_policy="always",
            **tiers,
        )
        return Engine(self.loaded, config)

    def _disk(self) -> dict[str, Any]:
        return {"disk_cache_dir": str(self.folder), "disk_cache_gib": 2 * self._host_gib}

    def _far(self) -> dict[str, Any]:
        return {"remote_cache_url": self.remote} if self.remote else {}

    def tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self.loaded.config.vocab_size, count).tolist()

    @contextmanager
    def state(self, mode: str) -> Iterator[Engine]:
        """An engine that has the last prefix where `mode` says, and nowhere nearer."""
        if mode == "hit":
            yield self.engine
        elif mode == "host":
            self.engine._runner.reset_cache(keep_pinned=False)  # the device's alone
            self.engine._runner.stats()  # waits for it
            yield self.engine
        else:
            stack = self.engine._runner.tiers
            assert stack is not None
            stack.stack.flush()
            if mode == "disk":
                self._forget_pages()
            engine = self.new_engine(**(self._disk() if mode == "disk" else self._far()))
            try:
                engine.warmup()
                yield engine
            finally:
                engine.close()

    def _forget_pages(self) -> None:
        """Let what is on disk be read from there."""
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def forget(self) -> None:
        self.engine.reset_cache(disk=True, remote=True)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and tokens that were not computed."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    (answer,) = engine.generate([prompt], params)
    return time.perf_counter() - begin, answer.num_cached_tokens


def answer(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    return engine.generate([prompt], params)[0].token_ids


def best_product(shape: ModelShape, config: LlamaConfig, chunk: int) -> float:
    """FLOP/s of the fastest of the model's products with a chunk."""
    width, mlp = config.hidden_size, config.intermediate_size
    rates = []
    for inputs, outputs in ((width, width), (width, 2 * mlp), (mlp, width)):
        x, weight = jnp.full((chunk, inputs), 0.5), jnp.full((inputs, outputs), 0.5)
        product = jax.jit(jnp.matmul)
        seconds = median_seconds(lambda p=product, x=x, w=weight: p(x, w))
        rates.append(2 * chunk * inputs * outputs / seconds)
    return max(rates)


def copy_seconds(num_bytes: int) -> float:
    """Of one copy of so many bytes that no cache holds: the least of some."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    other = np.ones(1 << 28, np.uint8)  # what caches hold when the copy begins
    seconds = []
    for _ in range(5):
        other += 1
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(bench: Bench, length: int, repeats: int, modes: list[str]) -> dict[str, Any]:
    """Seconds to the first token in every state of a prefix of `length`, the least of some."""
    times: dict[str, list[float]] = {mode: [] for mode in ("miss", *modes)}
    equal, rates = True, []
    for _ in range(repeats):
        bench.forget()
        prefix = bench.tokens(length)
        prompt = prefix + bench.tokens(NEW)
        rates.append(best_product(bench.shape, bench.loaded.config, bench.chunk))
        seconds, cached = first_token(bench.engine, prompt)
        rates.append(best_product(bench.shape, bench.loaded.config, bench.chunk))
        assert cached == 0, "a cold prompt found something"
        times["miss"].append(seconds)
        cold = answer(bench.engine, prompt)
        slow = [mode for mode in modes if mode not in ("hit", "host")]
        # Those that are compared to a few ms take turns, so that a busy moment meets both.
        for mode in ["hit", "host"] * QUICK + slow * SLOW:
            with bench.state(mode) as engine:
                seconds, cached = first_token(engine, prefix + bench.tokens(NEW))
                assert cached == length, f"{mode}: {cached} tokens of {length} came back"
                times[mode].append(seconds)
        for mode in modes:
            with bench.state(mode) as engine:
                equal &= answer(engine, prompt) == cold
    flops = prefill_flops(bench.shape, 0, length + NEW)
    kv_bytes = 2 * bench.shape.num_layers * bench.shape.num_kv_heads * bench.shape.head_size
    kv_bytes *= bench.shape.kv_dtype_bytes * length
    # The least: a shared machine is at times half as fast, for seconds, and never faster.
    miss = min(times["miss"])
    return {
        "length": length,
        "seconds": {mode: min(seconds) for mode, seconds in times.items()},
        "all_seconds": times,
        "flops": flops,
        "flops_per_second": flops / miss,
        "product_flops_per_second": max(rates),
        "kv_bytes": kv_bytes,
        "copy_seconds": copy_seconds(kv_bytes),
        "equal": equal,
    }


def predict(costs: CostModel, length: int, modes: list[str]) -> dict[str, float]:
    hit = costs.seconds_to_first_token(length, length + NEW)
    seconds = {"miss": costs.seconds_to_first_token(0, length + NEW), "hit": hit}
    for tier in set(modes) - {"hit"}:
        seconds[tier] = costs.seconds_to_restore(tier, length) + hit
    return seconds


def learned(costs: CostModel, rows: list[dict[str, Any]], modes: list[str]) -> CostModel:
    """What the short lengths teach: a step's own time, FLOP/s, and bandwidths."""
    if len(rows) < 2:
        return costs
    hits = [(r["length"], r["length"] + NEW, r["seconds"]["hit"]) for r in rows]
    # Between short hits the noise outweighs what the longer prefix adds: they tell no bandwidth.
    with suppress(ValueError):
        costs = fit_hits(costs, hits)
    misses = [(0, r["length"] + NEW, r["seconds"]["miss"]) for r in rows]
    least = min(seconds / -(-stop // costs.chunk_size) for _, stop, seconds in misses)
    own = min(costs.hardware.dispatch_seconds, least / 2)
    costs = replace(costs, hardware=replace(costs.hardware, dispatch_seconds=own))
    costs = fit_prefill(costs, misses)
    for tier in set(modes) - {"hit"}:
        points = [(r["length"], r["seconds"][tier] - r["seconds"]["hit"]) for r in rows]
        # Theil and Sen's slope, which one slow restore does not tilt; what each takes beside its
        # bytes hardly counts for long ones.
        pairs = itertools.combinations(points, 2)
        slope = float(np.median([(t - s) / (n - m) for (m, s), (n, t) in pairs]))
        if slope > 0:
            costs = fit_restore(costs, tier, 1, slope)
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shortest", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=3, help="3 x up to 4K; 1 from 64K on")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--remote-cache-url", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    loaded = small_llama(
        args.longest,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        width=args.width,
    )
    modes = [mode for mode in MODES if mode != "remote" or args.remote_cache_url]
    folder = Path(tempfile.mkdtemp(prefix="octavo-miss-penalty-"))
    rows: list[dict[str, Any]] = []
    try:
        bench = Bench(loaded, args.longest, args.chunk, folder, args.remote_cache_url)
        begin = time.perf_counter()
        HERE = calibrate(bench.shape, chunk_size=args.chunk, disk_folder=folder)
        print(f"calibrated in {time.perf_counter() - begin:.1f} s", flush=True)
        costs = CostModel(bench.shape, replace(HERE, peak_remote_bytes=1e9), chunk_size=args.chunk)
        first_token(bench.engine, bench.tokens(args.shortest))
        length = args.shortest
        while length <= args.longest:
            predicted = predict(costs, length, modes) if length > FITTED else None
            repeats = 3 * args.repeats if length <= FITTED else args.repeats
            row = measure(bench, length, repeats if length <= 32_768 else 1, modes)
            tiers = [mode for mode in modes if mode != "hit"]
            row["choice"] = {
                tier: plan_restore(costs, 0, BLOCK, [tier] * (length // BLOCK)).decision
                for tier in tiers
            }
            row["predicted"] = predicted
            rows.append(row)
            costs = learned(costs, rows, modes)
            print(table(rows, modes).splitlines()[-1], flush=True)
            length *= 2
        bench.engine.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = table(rows, modes)
    print("\n" + text)
    if args.table:
        args.table.write_text(text, encoding="utf-8")
    if args.plot:
        plot(rows, modes, args.plot)
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items() if k not in ("json", "table", "plot")}
        versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
        found = {
            "settings": settings,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": versions,
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    failures = missed(rows)
    for failure in failures:
        print(f"missed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
