"""What Prometheus reads."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "A quick brown fox jumps over the lazy dog, and then does it again. " * 3


def scrape(http):
    """All samples by name and labels, the label `model_name` left out."""
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "smollm2"
            key = "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items()))
            samples[sample.name + key] = sample.value
    return samples


def complete(http, **fields):
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 5} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200
    return response.json()["usage"]


def test_counters_and_histograms_move_with_the_requests(http):
    complete(http)
    before = scrape(http)
    usage = complete(http)
    after = scrape(http)
    moved = {name: after[name] - before[name] for name in after}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert moved["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert moved["vllm:prefix_cache_queries_total"] == usage["prompt_tokens"]
    assert moved["vllm:prefix_cache_hits_total"] == cached
    assert moved["octavo:prefilled_tokens_total"] == usage["prompt_tokens"] - cached
    assert moved["vllm:generation_tokens_total"] == 5
    assert moved["vllm:request_success_total{finished_reason=length}"] == 1
    assert moved["vllm:request_success_total{finished_reason=stop}"] == 0
    assert moved["vllm:time_to_first_token_seconds_count"] == 1
    assert moved["vllm:e2e_request_latency_seconds_count"] == 1
    assert moved["vllm:e2e_request_latency_seconds_sum"] > 0
    assert moved["vllm:num_preemptions_total"] == 0


def test_every_token_after_the_first_has_a_latency(http):
    before = scrape(http)["vllm:inter_token_latency_seconds_count"]
    complete(http, max_tokens=9, ignore_eos=True)
    moved = scrape(http)["vllm:inter_token_latency_seconds_count"] - before
    # A step may bring several tokens; those that come with the first have no latency of their own.
    assert 0 < moved <= 8


def test_idle_gauges_are_zero_and_the_blocks_are_all_there(http, server):
    stats = server.wait_until(lambda stats: stats.num_active_blocks == 0)
    samples = scrape(http)
    assert samples["vllm:num_requests_running"] == 0
    assert samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["octavo:blocks{state=active}"] == 0
    assert samples["octavo:blocks{state=cached}"] > 0
    total = sum(samples[f"octavo:blocks{{state={s}}}"] for s in ("free", "cached", "active"))
    assert total == stats.num_blocks


@pytest.mark.parametrize("accept", ["application/openmetrics-text", "text/plain", "*/*"])
def test_a_scraper_gets_the_format_it_asks_for(http, accept):
    response = http.get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    wanted = accept if "openmetrics" in accept else "text/plain"
    assert response.headers["content-type"].startswith(wanted)
