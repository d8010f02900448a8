"""What quantising a model, or its KV cache, costs in quality: perplexity on a text, and choices.

    python benchmarks/perplexity.py [--model smollm2] [--quantization int8] \
        [--kv-cache-dtype bfloat16] [--text FILE] [--window 512] [--json FILE]

The text (`perplexity.txt`, prose of this project's pages as they were when it was made) is cut into
windows of so many tokens, and every token but a window's first is scored, by the model as loaded
in float32 without a cache, and by the other one, from a cache of that dtype if asked to. The same
tokens are scored, so the difference has a much smaller error than either perplexity.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo.models import Llama, LoadedModel, load_model
from octavo.paged import packed_batch
from octavo.pallas_kernels import cache_shape, init_kv_cache

TEXT = Path(__file__).with_suffix(".txt")
BLOCK = 16


def logits_with_cache(model: Llama, tokens: jax.Array, cache_dtype: str) -> jax.Array:
    """Logits `[T, V]` of a text, its keys and values read from a cache."""
    config, size = model.config, len(tokens)
    num_blocks = 1 + -(-size // BLOCK)
    sizes = (num_blocks, config.num_kv_heads, BLOCK, config.head_size)
    shape = cache_shape(*sizes, jax.default_backend())
    kv_cache = init_kv_cache(config.num_layers, shape, cache_dtype)
    tables, lens = jnp.arange(1, num_blocks, dtype=jnp.int32)[None], jnp.full(1, size, jnp.int32)
    batch, positions = packed_batch(tables, lens, lens, num_tokens=size, block_size=BLOCK)
    batch = replace(batch, logit_rows=jnp.arange(size, dtype=jnp.int32))
    logits, _ = model(tokens, positions, kv_cache, batch)
    return logits


def compare(
    whole: LoadedModel,
    quantized: LoadedModel,
    windows: np.ndarray,
    cache_dtype: str | None = None,
) -> dict[str, float]:
    """Of the tokens `int32[W, T]`: both perplexities, and how far the distributions are apart."""

    models = [nnx.split(loaded.model) for loaded in (whole, quantized)]
    graphdefs, states = zip(*models, strict=True)

    @jax.jit
    def one(states: tuple[nnx.State, ...], tokens: jax.Array) -> tuple[jax.Array, ...]:
        first, other = (nnx.merge(*model) for model in zip(graphdefs, states, strict=True))
        if cache_dtype is None:
            logits = other.sequence_logits(tokens)
        else:
            logits = logits_with_cache(other, tokens, cache_dtype)
        both = first.sequence_logits(tokens), logits
        p, q = (jax.nn.log_softmax(x[:-1].astype(jnp.float32)) for x in both)
        own = tokens[1:, None]
        loss, quantized_loss = (-jnp.take_along_axis(x, own, axis=1)[:, 0] for x in (p, q))
        divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        return loss, quantized_loss, p.argmax(axis=-1) == q.argmax(axis=-1), divergence

    parts = [jax.device_get(one(states, jnp.asarray(window))) for window in windows]
    loss, quantized_loss, agrees, divergence = (
        np.concatenate(part).astype(np.float64) for part in zip(*parts, strict=True)
    )
    more = quantized_loss - loss
    return {
        "num_scored_tokens": len(loss),
        "perplexity_float32": float(np.exp(loss.mean())),
        "perplexity_quantized": float(np.exp(quantized_loss.mean())),
        "log_ratio": float(more.mean()),
        "log_ratio_standard_error": float(more.std(ddof=1) / np.sqrt(len(more))),
        "top_1_agreement": float(agrees.mean()),
        "mean_divergence_nats": float(divergence.mean()),
    }


def main() -> None:
    """Compare, print and, if asked to, write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="int8", help="or none")
    parser.add_argument("--kv-cache-dtype", help="read from such a cache; without one by default")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    whole = load_model(args.model)
    quantization = None if args.quantization == "none" else args.quantization
    quantized = load_model(args.model, quantization=quantization)
    ids = whole.tokenizer.encode(args.text.read_text("utf-8"), add_special_tokens=False)
    if len(ids) < args.window or args.window < 2:
        parser.error(f"a text of {len(ids)} tokens has no window of {args.window}")
    num_windows = len(ids) // args.window
    windows = np.array(ids[: num_windows * args.window], np.int32).reshape(num_windows, -1)
    report = {
        "model": args.model,
        "quantization": quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "text": args.text.name,
        "num_tokens": len(ids),
        "window": args.window,
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "octavo": metadata.version("octavo"),
        **compare(whole, quantized, windows, args.kv_cache_dtype),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
