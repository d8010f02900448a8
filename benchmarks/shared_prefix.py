"""A burst of requests that share a prefix, against any OpenAI completions endpoint.

Every repeat takes a prefix that the server has not seen. Its first burst is `cold`; a second one
with the same prefix and other suffixes is `warm`; with `--no-sharing` a third, `apart`, gives each
request a prefix of its own. All requests of a burst are sent at once, greedy, and streamed. A
prompt is a line of words of one token each, so that its length in tokens is known; the server's
`usage` is checked against it.

    python benchmarks/shared_prefix.py --base-url http://127.0.0.1:8000/v1 --model smollm2 \
        --requests 32 --prefix 1024 --suffix 32 --output 64 --repeats 5 --save results.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx

# With a leading space each is one token in GPT-2's vocabulary and those grown from it (SmolLM2).
COMMON = """
    about after again also always another any around ask away back because before began between
    both boy build call came change city close come could country cut day did different do does
    door down draw each earth eat end even every face family far father feet few find first follow
    food form found four girl give go good great group grow hand hard head hear help her here high
    him home house how idea important just keep kind know land large last late learn leave left
    letter life light like line list little live long look made make man many mean men might mile
    money more most mother move much must name near need never new next night no not number of off
    often old on once one only open other our out over own page paper part people picture place
    plant play point read real right river run said same saw say school sea second see seem
    sentence set she should show side small so some song soon sound state still stop story study
    such take talk tell than that the their them then there these they thing think this those
    thought three through time together took tree try turn two under until up us use very walk
    want watch water way we well went were what when where which while white who why will with
    without word work world would write year you young
"""
WORDS = COMMON.split()
VERSIONS = ("octavo", "jax", "jaxlib", "flax", "vllm", "torch")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one request measured; times in seconds from the moment it was sent."""

    first_token: float
    last_token: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Burst:
    """What one burst measured; times in seconds."""

    seconds: float
    output_tokens_per_second: float
    ttft_mean: float
    ttft_p95: float
    cached_tokens_mean: float | None


def words(rng: random.Random, num_tokens: int) -> str:
    """A text of exactly `num_tokens` tokens."""
    return "".join(f" {rng.choice(WORDS)}" for _ in range(num_tokens))


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
    """Stream one completion. Raises RuntimeError if the server reports an error."""
    start = time.perf_counter()
    first = last = None
    usage: dict[str, Any] = {}
    async with client.stream("POST", "completions", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise RuntimeError(f"the stream broke off: {event['error']}")
            usage = event.get("usage") or usage
            if any(choice["text"] for choice in event["choices"]):
                last = time.perf_counter() - start
                first = last if first is None else first
    if first is None or last is None or not usage:
        raise RuntimeError("the stream ended without text or without usage")
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        first_token=first,
        last_token=last,
        num_prompt_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        num_cached_tokens=details.get("cached_tokens"),
    )


async def run_burst(args: argparse.Namespace, prompts: Sequence[str]) -> Burst:
    """Send all prompts at once. Raises RuntimeError if token counts are not as asked."""
    body = {"model": args.model, "max_tokens": args.output, "temperature": 0.0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **args.extra}
    # No proxy and no limit: neither may stand between the requests and the server.
    async with httpx.AsyncClient(
        base_url=args.base_url,
        timeout=args.timeout,
        limits=httpx.Limits(max_connections=None),
        headers={"Authorization": f"Bearer {args.api_key}"},
        trust_env=False,
    ) as client:
        start = time.perf_counter()
        replies = await asyncio.gather(*(ask(client, body | {"prompt": p}) for p in prompts))
        seconds = time.perf_counter() - start
    expected = (args.prefix + args.suffix, args.output)
    counts = {(r.num_prompt_tokens - args.extra_tokens, r.num_output_tokens) for r in replies}
    if counts != {expected}:
        raise RuntimeError(f"(prompt, output) tokens should be {expected}, they are {counts}")
    ttft = sorted(reply.first_token for reply in replies)
    cached = [r.num_cached_tokens for r in replies if r.num_cached_tokens is not None]
    return Burst(
        seconds=seconds,
        output_tokens_per_second=len(replies) * args.output / seconds,
        ttft_mean=statistics.mean(ttft),
        ttft_p95=ttft[min(len(ttft) - 1, int(0.95 * len(ttft)))],
        cached_tokens_mean=statistics.mean(cached) if cached else None,
    )


def bursts_of_repeat(args: argparse.Namespace, repeat: int) -> dict[str, list[str]]:
    """The prompts of each burst; no prefix is used again in another repeat or another run."""
    rng = random.Random(f"{args.seed} {repeat} {args.prefix} {args.requests}")
    prefix = words(rng, args.prefix)
    bursts = {
        name: [prefix + words(rng, args.suffix) for _ in range(args.requests)]
        for name in ("cold", "warm")
    }
    if args.no_sharing:
        total = args.prefix + args.suffix
        bursts["apart"] = [words(rng, total) for _ in range(args.requests)]
    return bursts


def medians(bursts: Sequence[Burst]) -> dict[str, float | None]:
    """The median of every figure over the repeats."""
    rows = [asdict(burst) for burst in bursts]
    return {
        name: None if rows[0][name] is None else statistics.median(row[name] for row in rows)
        for name in rows[0]
    }


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """Device, versions and commit: what was given, else what this machine and folder say."""
    installed = {}
    for name in VERSIONS:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": args.device or f"{platform.machine()} CPU",
        "python": platform.python_version(),
        "versions": args.versions or installed,
        "commit": args.commit or head.stdout.strip() or None,
    }


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000/v1")
    add("--model", default="smollm2")
    add("--api-key", default="none")
    add("--requests", type=int, default=32, help="requests per burst")
    add("--prefix", type=int, default=1024, help="tokens that all share")
    add("--suffix", type=int, default=32, help="tokens of each request's own")
    add("--output", type=int, default=64, help="tokens to generate")
    add("--repeats", type=int, default=3)
    add("--no-sharing", action="store_true", help="also a burst without a common prefix")
    add("--seed", type=int, default=time.time_ns(), help="by default new in every run")
    add("--extra", type=json.loads, default={"ignore_eos": True}, help="JSON for each body")
    add("--extra-tokens", type=int, default=0, help="tokens that the server puts before (BOS)")
    add("--timeout", type=float, default=3600.0, help="seconds per request")
    add("--label", default="", help="what is measured, for the result file")
    add("--device", default="", help="where the server runs")
    add("--commit", default="", help="the server's commit or version")
    add("--versions", type=json.loads, default=None, help="JSON: the server's packages")
    add("--save", type=Path, default=None, help="write the result here as JSON")
    return parser.parse_args()


def main() -> int:
    """Run all bursts, print one line for each and the medians, and save them."""
    args = parse_args()
    results: dict[str, list[Burst]] = {}
    print(f"{'burst':8} {'total s':>8} {'tok/s':>8} {'TTFT s':>8} {'p95 s':>8} {'cached':>8}")
    for repeat in range(args.repeats):
        for name, prompts in bursts_of_repeat(args, repeat).items():
            try:
                burst = asyncio.run(run_burst(args, prompts))
            except (RuntimeError, httpx.HTTPError) as error:
                print(f"error in a {name} burst: {error or type(error).__name__}", file=sys.stderr)
                return 1
            results.setdefault(name, []).append(burst)
            print_row(name, asdict(burst))
    print("medians")
    summary = {name: medians(bursts) for name, bursts in results.items()}
    for name, row in summary.items():
        print_row(name, row)
    if args.save is not None:
        settings = ("base_url", "model", "requests", "prefix", "suffix", "output", "repeats")
        document = {
            "label": args.label,
            "environment": environment(args),
            "settings": {name: getattr(args, name) for name in (*settings, "extra")},
            "medians": summary,
            "bursts": {name: [asdict(b) for b in bursts] for name, bursts in results.items()},
        }
        args.save.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def print_row(name: str, row: dict[str, float | None]) -> None:
    """One line of the table."""
    cells = [f"{name:8}"]
    for value, digits in zip(row.values(), (2, 1, 3, 3, 1), strict=True):
        cells.append(f"{'-':>8}" if value is None else f"{value:8.{digits}f}")
    print(" ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
