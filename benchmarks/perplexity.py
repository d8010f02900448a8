"""What quantising a model's weights costs in quality: perplexity on a fixed text, and choices.

    python benchmarks/perplexity.py [--model smollm2] [--quantization int8] [--text FILE] \
        [--window 512] [--json FILE]

The text (`perplexity.txt`, prose of this project's pages as they were when it was made) is cut into
windows of so many tokens, and every token but a window's first is scored, by the model as loaded
in float32 and by the quantised one. The same tokens are scored, so the difference has a much
smaller error than either perplexity.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo.models import LoadedModel, load_model

TEXT = Path(__file__).with_suffix(".txt")


def compare(whole: LoadedModel, quantized: LoadedModel, windows: np.ndarray) -> dict[str, float]:
    """Of the tokens `int32[W, T]`: both perplexities, and how far the distributions are apart."""

    models = [nnx.split(loaded.model) for loaded in (whole, quantized)]
    graphdefs, states = zip(*models, strict=True)

    @jax.jit
    def one(states: tuple[nnx.State, ...], tokens: jax.Array) -> tuple[jax.Array, ...]:
        p, q = (
            jax.nn.log_softmax(nnx.merge(graphdef, state).sequence_logits(tokens)[:-1])
            for graphdef, state in zip(graphdefs, states, strict=True)
        )
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
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    whole = load_model(args.model)
    quantized = load_model(args.model, quantization=args.quantization)
    ids = whole.tokenizer.encode(args.text.read_text("utf-8"), add_special_tokens=False)
    if len(ids) < args.window or args.window < 2:
        parser.error(f"a text of {len(ids)} tokens has no window of {args.window}")
    num_windows = len(ids) // args.window
    windows = np.array(ids[: num_windows * args.window], np.int32).reshape(num_windows, -1)
    report = {
        "model": args.model,
        "quantization": args.quantization,
        "text": args.text.name,
        "num_tokens": len(ids),
        "window": args.window,
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "octavo": metadata.version("octavo"),
        **compare(whole, quantized, windows),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
