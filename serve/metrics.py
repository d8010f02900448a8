"""Prometheus metrics of one server, under vLLM's names where vLLM has them.

Counters and gauges that the engine keeps are read from its `EngineStats` when Prometheus asks;
only latencies and the number of finished requests are collected as they happen.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from .outputs import EngineStats

_SECONDS = tuple(
    step * 10.0**decade for decade in range(-3, 3) for step in (1.0, 2.5, 5.0)
)  # 1 ms to 500 s

# (metric, field of EngineStats, help)
_GAUGES = (
    ("vllm:num_requests_running", "num_running", "Requests that hold blocks."),
    ("vllm:num_requests_waiting", "num_waiting", "Requests that wait to be admitted."),
)
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_query_tokens", "Prompt tokens looked up in the cache."),
    ("vllm:prefix_cache_hits", "prefix_hit_tokens", "Prompt tokens found in the cache."),
    (
        "vllm:external_prefix_cache_queries",
        "external_query_tokens",
        "Prompt tokens looked up in tiers below the device.",
    ),
    (
        "vllm:external_prefix_cache_hits",
        "external_hit_tokens",
        "Prompt tokens that came from tiers below the device.",
    ),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
    ("vllm:num_preemptions", "num_preemptions", "Requests preempted to give their blocks away."),
    ("vllm:spec_decode_num_draft_tokens", "num_draft_tokens", "Tokens guessed by speculation."),
    ("vllm:spec_decode_num_accepted_tokens", "num_accepted_tokens", "Guesses that were right."),
    ("octavo:prefilled_tokens", "prefilled_tokens", "Prompt tokens computed, not found."),
)
# The same of `TierStats`, each with the label `tier`.
_TIER_GAUGES = (
    ("octavo:tier_blocks", "num_blocks", "Blocks that a tier below the device holds."),
    ("octavo:tier_bytes", "num_bytes", "Bytes of them."),
    ("octavo:tier_pinned_blocks", "pinned", "Those that are not evicted."),
)
_TIER_COUNTERS = (
    ("octavo:tier_hits", "hits", "Blocks read from a tier below the device."),
    (
        "octavo:tier_misses",
        "misses",
        "Blocks that were gone or damaged when they were read.",
    ),
    ("octavo:tier_evictions", "evictions", "Blocks that made room for others."),
    ("octavo:tier_drops", "drops", "Blocks that a tier had no time to take."),
    ("octavo:tier_errors", "errors", "Blocks that could not be written or read, or were damaged."),
)
# The same of `RestoreStats`.
_RESTORE_COUNTERS = (
    ("octavo:restore_predicted_seconds", "predicted_seconds", "Predicted of choices that ended."),
    ("octavo:restore_actual_seconds", "actual_seconds", "What they took."),
    (
        "octavo:restore_regret_seconds",
        "regret_seconds",
        "By which they took longer than the other way was predicted to take.",
    ),
)
_BLOCK_STATES = ("free", "cached", "active")

# The engine's finish reasons, and what vLLM calls them where it differs.
_FINISHED_REASONS = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "timeout": "timeout",
}


class ServerMetrics:
    """The metrics of one served model, in a registry of their own.

    Args:
        model_name: value of the label `model_name` of every metric.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._stats: EngineStats | None = None
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From submission to the first token."
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request."
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From submission to the last token."
        )
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in _FINISHED_REASONS.values():
            self._finished.labels(model_name, reason)
        self.registry.register(self)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, `seconds` after it was submitted."""
        self._first_token.observe(seconds)

    def more_tokens(self, num_tokens: int, seconds: float) -> None:
        """A request got `num_tokens` more, `seconds` after the ones before."""
        for _ in range(num_tokens):
            self._inter_token.observe(seconds / num_tokens)

    def request_finished(self, finish_reason: str, seconds: float) -> None:
        """A request ended with `finish_reason`, `seconds` after it was submitted."""
        self._finished.labels(self._model_name, _FINISHED_REASONS[finish_reason]).inc()
        self._latency.observe(seconds)

    def render(self, stats: EngineStats | None, accept: str = "") -> tuple[bytes, str]:
        """The page for a scraper that sends the header `accept`, and its content type.

        `stats` None repeats the engine's last known numbers.
        """
        if stats is not None:
            self._stats = stats
        encode_fn, content_type = choose_encoder(accept)
        return encode_fn(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """What the registry calls: the engine's own numbers."""
        if (stats := self._stats) is None:
            return
        labels = [self._model_name]
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(labels, getattr(stats, field))
            yield counter
        blocks = {state: getattr(stats, f"num_{state}_blocks") for state in _BLOCK_STATES}
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Blocks held by requests; 1 means all of them.",
            labels=["model_name"],
        )
        usage.add_metric(labels, blocks["active"] / max(1, sum(blocks.values())))
        yield usage
        by_state = GaugeMetricFamily(
            "octavo:blocks", "Blocks of the pool by state.", labels=["model_name", "state"]
        )
        for state, num_blocks in blocks.items():
            by_state.add_metric([*labels, state], num_blocks)
        yield by_state
        yield from self._tiers(stats)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        if not stats.tiers:
            return
        choices = CounterMetricFamily(
            "octavo:restore_choices",
            "Stretches found below the device, by what was done.",
            labels=["model_name", "choice"],
        )
        for choice in ("restored", "recomputed", "split"):
            count = getattr(stats.restores, f"num_{choice}")
            choices.add_metric([self._model_name, choice], count)
        yield choices
        for name, field, text in _RESTORE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(stats.restores, field))
            yield counter
        kinds = (GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)
        for family, metrics in kinds:
            for name, field, text in metrics:
                metric = family(name, text, labels=["model_name", "tier"])
                for tier, numbers in stats.tiers.items():
                    metric.add_metric([self._model_name, tier], getattr(numbers, field))
                yield metric

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], buckets=_SECONDS, registry=self.registry)
        return histogram.labels(self._model_name)
