"""One inference engine in a process of its own, answering batches of token ids on request.

    python benchmarks/serving_workers.py octavo|transformers|vllm|llama.cpp MODEL [option ...]

Reads a JSON line `{"prompts": [[int, ...], ...], "max_tokens": n}` at a time, answers greedily,
past the end of sequence, with
`{"tokens": [[int, ...], ...], "first": [seconds, ...], "progress": [[seconds, tokens], ...]}`: when
each prompt's first token came, and how many tokens of all there were at a time, in seconds from
the moment the line was read. `serving.py` starts these.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, "Clock"], list[list[int]]]


class Clock:
    """Notes when tokens come."""

    def __init__(self, num_prompts: int):
        self._begin = time.perf_counter()
        self._total = 0
        self._lock = threading.Lock()
        self.first: list[float | None] = [None] * num_prompts
        self.progress: list[tuple[float, int]] = []

    def note(self, counts: dict[int, int]) -> None:
        """Prompts by index have gained tokens."""
        with self._lock:
            now = time.perf_counter() - self._begin
            for index, count in counts.items():
                if count and self.first[index] is None:
                    self.first[index] = now
            self._total += sum(counts.values())
            self.progress.append((now, self._total))


def octavo(model: str, options: list[str]) -> Generate:
    """octavo's engine; options are `name=value` of `EngineConfig`, or `quantization`."""
    from octavo.models import load_model
    from octavo.serve import Engine, EngineConfig, SamplingParams

    settings = {k: json.loads(v) for k, v in (option.split("=", 1) for option in options)}
    quantization = settings.pop("quantization", None)
    loaded = load_model(model, quantization=quantization)
    engine = Engine(loaded, EngineConfig(**settings))
    engine.warmup()

    def generate(prompts: Prompts, max_tokens: int, clock: Clock) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        index = {engine.add_request(p, params): i for i, p in enumerate(prompts)}
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.num_unfinished:
            gained = {}
            for output in engine.step():
                tokens[index[output.request_id]] += output.token_ids
                gained[index[output.request_id]] = len(output.token_ids)
            clock.note(gained)
        return tokens

    return generate


def transformers(model: str, options: list[str]) -> Generate:
    """Hugging Face transformers, a static batch; a single prompt finds the last one's cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(2)
    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    kept: tuple[list[int], Any] = ([], None)

    @torch.inference_mode()
    def generate(prompts: Prompts, max_tokens: int, clock: Clock) -> list[list[int]]:
        nonlocal kept
        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("all prompts must have one length")
        cache, start = DynamicCache(), 0
        if len(prompts) == 1 and kept[1] is not None:
            same = [a == b for a, b in zip(kept[0], prompts[0][:-1], strict=False)]
            start = same.index(False) if False in same else len(same)
            if start:
                cache = kept[1]
                if too_many := len(kept[0]) - start:
                    cache.crop(-too_many)
        ids = torch.tensor([prompt[start:] for prompt in prompts])
        tokens: list[list[int]] = [[] for _ in prompts]
        for _ in range(max_tokens):
            logits = llama(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            for own, token in zip(tokens, ids[:, 0].tolist(), strict=True):
                own.append(token)
            clock.note(dict.fromkeys(range(len(prompts)), 1))
        if len(prompts) == 1:
            kept = (prompts[0] + tokens[0][:-1], cache)
        return tokens

    return generate


def vllm(model: str, options: list[str]) -> Generate:
    """vLLM on CPU, in process; options are `name=value` of its `LLM`."""
    from vllm import LLM, SamplingParams

    settings = {k: json.loads(v) for k, v in (option.split("=", 1) for option in options)}
    defaults = {"dtype": "float32", "max_model_len": 8192, "enforce_eager": True}
    defaults |= {"enable_prefix_caching": True, "skip_tokenizer_init": True}
    engine = LLM(model, **(defaults | settings)).llm_engine
    number = 0

    def generate(prompts: Prompts, max_tokens: int, clock: Clock) -> list[list[int]]:
        nonlocal number
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        index = {}
        for i, prompt in enumerate(prompts):
            number += 1
            index[str(number)] = i
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            gained = {}
            for output in engine.step():
                own = index[output.request_id.split("-")[0]]
                new = list(output.outputs[0].token_ids)
                gained[own] = len(new) - len(tokens[own])
                tokens[own] = new
            clock.note(gained)
        return tokens

    return generate


def llama_cpp(model: str, options: list[str]) -> Generate:
    """llama-server on a free port; the first option is its path, the others are its arguments."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [options[0], "-m", model, "-t", "2", "-tb", "2", "-np", "8", "-c", "69632"]
    subprocess.Popen(
        [*command, "--port", str(port), *options[1:]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            if json.load(urllib.request.urlopen(f"{url}/health", timeout=5))["status"] == "ok":
                break
        except OSError:
            time.sleep(0.5)
    else:
        raise RuntimeError("llama-server did not come up")

    def one(i: int, prompt: list[int], max_tokens: int, clock: Clock, tokens: list) -> None:
        body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "stream": True}
        body |= {"cache_prompt": True, "ignore_eos": True, "return_tokens": True}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=3600) as response:
            for line in response:
                if line.startswith(b"data:"):
                    new = json.loads(line[5:]).get("tokens") or []
                    tokens[i] += new
                    clock.note({i: len(new)})

    def generate(prompts: Prompts, max_tokens: int, clock: Clock) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in prompts]
        threads = [
            threading.Thread(target=one, args=(i, prompt, max_tokens, clock, tokens))
            for i, prompt in enumerate(prompts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tokens

    return generate


ENGINES = {"octavo": octavo, "transformers": transformers, "vllm": vllm, "llama.cpp": llama_cpp}


def main() -> None:
    name, model, *options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and their processes print is no answer
    generate = ENGINES[name](model, options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        clock = Clock(len(asked["prompts"]))
        tokens = generate(asked["prompts"], asked["max_tokens"], clock)
        answer = {"tokens": tokens, "first": clock.first, "progress": clock.progress}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
