"""Check and measure the GPU kernels on the GPU at hand, beside its own copy, matmul and peers.

    python benchmarks/gpu_suite.py                  # writes results/gpu_suite.{json,md}
    python benchmarks/gpu_suite.py --dry-run        # tiny shapes, on any CPU

Every rate is of the bytes of keys and values (or the operations on them) that the problem needs,
not of what a kernel moves, and is given beside what a plain copy (or bfloat16 matmul) reached in
the same run. A section that fails is reported and does not stop the others; none is started after
`--budget` seconds. Exits with 1 if a check fails or a section breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# PyTorch's peers need memory of the same GPU; before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
if "--dry-run" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import attention_cases
import gpu_peers
import gpu_problems
import jax
import jax.numpy as jnp
import numpy as np
from gpu_problems import Problem, Shape

from octavo import pallas_kernels as ops
from octavo.paged import shared_prefixes

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


class Suite:
    """The run's sizes, rates to compare with, and rows."""

    def __init__(self, *, dry: bool, budget: float) -> None:
        self.dry = dry
        self.end = time.monotonic() + budget
        self.implementation = "xla" if dry else "mosaic_gpu"
        self.rows: list[Row] = []
        self.problems: list[str] = []
        self.copy_rate = self.matmul_rate = float("nan")

    def seconds(self, start: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
        """Median over rounds of the mean time of calls that follow one another on the device."""
        wait(start())
        begin = time.perf_counter()
        wait(start())
        once = time.perf_counter() - begin
        calls = 1 if self.dry else max(3, min(50, int(0.05 / max(once, 1e-6))))
        rounds = []
        for _ in range(1 if self.dry else 5):
            begin = time.perf_counter()
            results = [start() for _ in range(calls)]
            wait(results[-1])
            rounds.append((time.perf_counter() - begin) / calls)
        return statistics.median(rounds)

    def add(self, section: str, case: str, who: str, **figures: Any) -> Row:
        row = {"section": section, "case": case, "who": who} | figures
        self.rows.append(row)
        numbers = (
            f"{k}={v:,.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items()
        )
        print(f"{section}: {case}: {who}: {', '.join(numbers)}", flush=True)
        return row

    def bandwidth(
        self, section: str, case: str, who: str, num_bytes: int, seconds: float, **more: Any
    ) -> Row:
        rate = num_bytes / seconds
        share = rate / self.copy_rate
        return self.add(
            section, case, who, ms=seconds * 1e3, gb_per_s=rate / 1e9, of_copy=share, **more
        )

    def compute(
        self, section: str, case: str, who: str, flops: int, seconds: float, **more: Any
    ) -> Row:
        rate = flops / seconds
        share = rate / self.matmul_rate
        return self.add(
            section, case, who, ms=seconds * 1e3, tflop_per_s=rate / 1e12, of_matmul=share, **more
        )

    def check(self, case: str, who: str, error: float, most: float) -> None:
        ok = bool(error <= most)
        self.add("check", case, who, error=error, most=most, ok=ok)
        if not ok:
            self.problems.append(f"{case}, {who}: error {error:.3g} is above {most}")


def rates(suite: Suite) -> None:
    """What a copy and a matmul reach here; bytes are counted read and written."""
    size = 1 << (12 if suite.dry else 31)
    block = jnp.zeros(size // 2, jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    suite.copy_rate = 2 * size / suite.seconds(lambda: copy(block), jax.block_until_ready)
    suite.add("rates", f"{size >> 20} MiB", "copy", gb_per_s=suite.copy_rate / 1e9)
    n = 64 if suite.dry else 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    suite.matmul_rate = 2 * n**3 / suite.seconds(lambda: product(a), jax.block_until_ready)
    suite.add("rates", f"{n}^3", "bf16 matmul", tflop_per_s=suite.matmul_rate / 1e12)


def checks(suite: Suite) -> None:
    """Every case of the table against float64, until a third of the budget is gone."""
    end = time.monotonic() + 170
    cases = attention_cases.CASES
    names = ["mixed", "int8"] if suite.dry else list(cases)
    for name in names:
        case = cases[name]
        if time.monotonic() > end:
            suite.add("check", name, suite.implementation, ok=None, note="no time left")
            continue
        if not suite.dry and case.dtype == "float32":
            case = replace(case, dtype="bfloat16")
        problem = attention_cases.build(case)
        attend = jax.jit(
            lambda *args, options=problem.kwargs: ops.paged_attention(
                *args, implementation=suite.implementation, **options
            )
        )
        try:
            out, lse = attend(*problem.args)
            worst, _ = attention_cases.errors(out, lse, problem)
        except NotImplementedError as error:
            suite.add("check", name, suite.implementation, ok=None, note=str(error))
            continue
        suite.check(name, suite.implementation, worst, case.tolerances[0])


def attention(problem: Problem, implementation: str) -> Callable[[], Any]:
    shape = problem.shape

    @jax.jit
    def attend(q: jax.Array, kv_cache: jax.Array) -> jax.Array:
        return ops.paged_attention(
            q,
            kv_cache,
            problem.block_tables,
            problem.context_lens,
            problem.query_start,
            max_query_len=shape.queries,
            k_scale=problem.k_scale,
            v_scale=problem.v_scale,
            implementation=implementation,
        )[0]

    return lambda: attend(problem.q, problem.kv_cache)


def measure(suite: Suite, section: str, shape: Shape, *, with_peers: bool, with_xla: bool) -> None:
    """One problem: octavo's kernel, checked on some rows; XLA; the peers; ratios to octavo's."""
    problem = gpu_problems.make(shape)
    record = suite.bandwidth if shape.queries == 1 else suite.compute
    work = shape.kv_bytes if shape.queries == 1 else shape.flops
    start = attention(problem, suite.implementation)
    suite.check(
        f"{section}: {shape.name}",
        suite.implementation,
        gpu_problems.worst_error(start(), problem),
        2e-2,
    )
    own = suite.seconds(start, jax.block_until_ready)
    record(section, shape.name, suite.implementation, work, own)
    if with_xla:
        plain = suite.seconds(attention(problem, "xla"), jax.block_until_ready)
        record(section, shape.name, "xla", work, plain, slower_than_octavo=plain / own)
    if not with_peers:
        return
    for name, peer, why_not in gpu_peers.peers(problem):
        if peer is None:
            suite.add(section, shape.name, name, note=why_not)
            continue
        try:
            seconds = suite.seconds(*peer)
        except Exception as error:
            suite.add(section, shape.name, name, note=f"{type(error).__name__}: {error}"[:300])
            continue
        record(section, shape.name, name, work, seconds, slower_than_octavo=seconds / own)


def decode(suite: Suite) -> None:
    """Decode at 256 MB of keys and values and more, with every peer."""
    shapes = [(8, 8192), (64, 4096), (1, 131_072), (256, 2048)]
    for seqs, context in [(2, 40)] if suite.dry else shapes:
        shape = Shape(seqs=seqs, context=context)
        measure(suite, "decode", shape, with_peers=True, with_xla=seqs == 64)


def variants(suite: Suite) -> None:
    """Quantised caches, other heads and block sizes."""
    shape = Shape(seqs=2, context=40) if suite.dry else Shape(seqs=64, context=4096)
    for other in (
        replace(shape, dtype="float8_e4m3fn"),
        replace(shape, dtype="int8"),
        replace(shape, head_size=64),
        replace(shape, heads=64),
        replace(shape, block_size=32),
        replace(shape, block_size=64, dtype="float8_e4m3fn"),
    ):
        measure(suite, "decode variants", other, with_peers=False, with_xla=False)


def prefill(suite: Suite) -> None:
    """Whole prompts, and a chunk behind a long prefix that was hit."""
    whole = [(1, 8192), (1, 32_768), (8, 4096)]
    for seqs, length in [(1, 40)] if suite.dry else whole:
        shape = Shape(seqs=seqs, context=length, queries=length)
        measure(suite, "prefill", shape, with_peers=True, with_xla=length == 8192)
    for context, queries in [(48, 5)] if suite.dry else [(131_072, 2048), (131_072, 32)]:
        shape = Shape(seqs=1, context=context, queries=queries)
        measure(suite, "prefill behind a prefix", shape, with_peers=True, with_xla=False)
    if not suite.dry:
        for dtype in ("float8_e4m3fn", "int8"):
            shape = Shape(seqs=1, context=8192, queries=8192, dtype=dtype)
            measure(suite, "prefill variants", shape, with_peers=False, with_xla=False)


def cascade(suite: Suite) -> None:
    """Many sequences behind one prefix: read once, against read by each."""
    sizes = [(4, 64)] if suite.dry else [(32, 32_768), (128, 8192)]
    for seqs, shared in sizes:
        shape = Shape(seqs=seqs, context=shared + 64, shared=shared)
        problem = gpu_problems.make(shape)

        @jax.jit
        def attend(q: jax.Array, kv_cache: jax.Array, problem: Problem = problem) -> jax.Array:
            prefixes = shared_prefixes(
                problem.block_tables, problem.context_lens, problem.shape.block_size
            )
            return ops.shared_prefix_attention(
                q,
                kv_cache,
                problem.block_tables,
                problem.context_lens,
                prefixes,
                implementation=suite.implementation,
            )[0]

        def start(problem: Problem = problem, attend: Any = attend) -> jax.Array:
            return attend(problem.q, problem.kv_cache)

        error = gpu_problems.worst_error(start(), problem)
        suite.check(f"cascade: {shape.name}", "cascade", error, 2e-2)
        plain = suite.seconds(attention(problem, suite.implementation), jax.block_until_ready)
        once = suite.seconds(start, jax.block_until_ready)
        suite.add("cascade", shape.name, "plain decode", ms=plain * 1e3)
        suite.add("cascade", shape.name, "cascade", ms=once * 1e3, faster_than_plain=plain / once)


def movement(suite: Suite) -> None:
    """Writing new keys and values, and moving whole blocks; bytes are read and written."""
    blocks, tokens, moved = (64, 16, 4) if suite.dry else (65_536, 8192, 4096)
    shape = (blocks, 8, 16, 256)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(1 + rng.permutation(blocks - 1)[: 2 * moved].astype(np.int32))
    src, dst = ids[:moved], ids[moved:]
    slots = (src[: tokens // 16, None] * 16 + jnp.arange(16, dtype=jnp.int32)).reshape(-1)
    cache = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    new = jax.random.normal(jax.random.key(1), (len(slots), 8, 128), jnp.bfloat16)
    packed = cache[src]
    block_bytes = packed.nbytes // moved
    calls: dict[str, tuple[Callable[..., Any], int, tuple[Any, ...]]] = {
        "write_kv": (ops.write_kv, 2 * 2 * new.nbytes, (new, -new, slots)),
        "copy_blocks": (ops.copy_blocks, 2 * moved * block_bytes, (src, dst)),
        "scatter_blocks": (ops.scatter_blocks, 2 * moved * block_bytes, (dst, packed)),
        "gather_blocks": (ops.gather_blocks, 2 * moved * block_bytes, (src,)),
    }
    for name, (op, num_bytes, args) in calls.items():
        want = jax.jit(lambda c, *a, op=op: op(c, *a, implementation="reference"))(cache, *args)
        for implementation in dict.fromkeys((suite.implementation, "xla")):
            keeps = name == "gather_blocks"
            run = jax.jit(
                lambda c, *a, op=op, i=implementation: op(c, *a, implementation=i),
                donate_argnums=() if keeps else (0,),
            )
            got = run(cache if keeps else jnp.array(cache), *args)
            wrong = float(jnp.sum(got != want))
            suite.check(f"{name}: {len(slots)} tokens, {moved} blocks", implementation, wrong, 0)
            state = {"cache": got}

            def start(run: Any = run, args: Any = args, state: Any = state, keeps: Any = keeps):
                result = run(state["cache"] if not keeps else cache, *args)
                state["cache"] = result
                return result

            seconds = suite.seconds(start, jax.block_until_ready)
            case = f"{num_bytes >> 20} MiB"
            suite.bandwidth("movement", case, f"{name} {implementation}", num_bytes, seconds)
            del got, state


SECTIONS: tuple[Callable[[Suite], None], ...] = (
    rates,
    decode,
    prefill,
    cascade,
    variants,
    movement,
    checks,
)


def run(suite: Suite) -> None:
    for section in SECTIONS:
        if time.monotonic() > suite.end:
            suite.problems.append(f"{section.__name__}: not started, the budget is used up")
            continue
        begin = time.monotonic()
        try:
            section(suite)
        except Exception:
            text = traceback.format_exc()
            suite.problems.append(f"{section.__name__}: {text}")
            print(text, flush=True)
        jax.clear_caches()
        print(f"-- {section.__name__}: {time.monotonic() - begin:.1f} s", flush=True)


def environment() -> dict[str, str]:
    device = jax.devices()[0]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown(facts: dict[str, str], rows: list[Row], problems: list[str]) -> str:
    """One table per section, a column for every figure that occurs in it."""
    lines = ["# The GPU kernels, measured", "", ", ".join(f"{k} {v}" for k, v in facts.items())]
    for section in dict.fromkeys(row["section"] for row in rows):
        mine = [row for row in rows if row["section"] == section]
        columns = list(dict.fromkeys(key for row in mine for key in row if key != "section"))
        lines += [
            "",
            f"## {section}",
            "",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
        ]
        for row in mine:
            cells = (row.get(column, "") for column in columns)
            texts = (f"{c:,.4g}" if isinstance(c, float) else str(c) for c in cells)
            lines.append(f"| {' | '.join(text.replace('|', '/') for text in texts)} |")
    lines += ["", "## Problems", "", *(f"- {p.strip().splitlines()[-1]}" for p in problems)]
    return "\n".join(lines) + ("" if problems else "- none") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no files")
    parser.add_argument("--budget", type=float, default=500, help="seconds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the two files")
    args = parser.parse_args()
    facts = environment()
    if not args.dry_run and jax.default_backend() != "gpu":
        parser.error(f"no GPU here: JAX runs on {jax.default_backend()} (--dry-run needs none)")
    suite = Suite(dry=args.dry_run, budget=args.budget)
    run(suite)
    if not args.dry_run:
        args.out.mkdir(parents=True, exist_ok=True)
        everything = facts | {"rows": suite.rows, "problems": suite.problems}
        (args.out / "gpu_suite.json").write_text(json.dumps(everything, indent=1) + "\n")
        (args.out / "gpu_suite.md").write_text(markdown(facts, suite.rows, suite.problems))
    else:
        markdown(facts, suite.rows, suite.problems)
    print("\n".join(suite.problems) or "no problems")
    return 1 if suite.problems else 0


if __name__ == "__main__":
    sys.exit(main())
