# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Train adapters, and serve them in one batch
#
# Two LoRA adapters are trained with optax, each to answer one question in its own way, written in
# PEFT's format, and served together with the model that they belong to. So that it takes seconds,
# the model is the first two layers of SmolLM2, which knows words but has little to say; a whole
# one is trained in the same way.

# %%
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from octavo.models import Llama, LoraAdapter, load_adapter, load_model, save_adapter
from octavo.serve import Engine, EngineConfig, SamplingParams

LAYERS, RANK = 2, 8
whole = load_model("smollm2")
config = replace(whole.config, num_layers=LAYERS)
model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
weights = dict(nnx.to_flat_state(nnx.state(whole.model)))
kept = {path: weights[path] for path, _ in nnx.to_flat_state(nnx.state(model))}
model = nnx.merge(nnx.graphdef(model), nnx.from_flat_state(kept))
loaded = replace(whole, name="two-layers", model=model, config=config, fingerprint="two-layers")

# %% [markdown]
# An adapter in training is a stack of one slot: `sequence_logits` runs a whole sequence without a
# cache and has a gradient. Only the adapter's factors are parameters; those of projections that it
# does not have are zero and stay so.

# %%
QUESTION = "Question: Who are you? Answer:"
ANSWERS = {
    "keeper": " I keep the lighthouse, and I sleep by day.",
    "baker": " I bake the bread of the village before dawn.",
}
graph, base = nnx.split(model)
optimizer = optax.adam(3e-3)


@jax.jit
def train_step(stack, state, base, tokens, is_answer):
    def loss_fn(stack):
        logits = nnx.merge(graph, base).sequence_logits(tokens, stack)[:-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:])
        return jnp.sum(losses * is_answer[1:]) / jnp.sum(is_answer[1:])

    loss, gradient = jax.value_and_grad(loss_fn)(stack)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(stack, updates), state, loss


def train(answer: str, seed: int, num_steps: int = 40) -> LoraAdapter:
    """An adapter after which `answer` follows the question."""
    prompt, text = (whole.tokenizer.encode(s) for s in (QUESTION, QUESTION + answer))
    tokens, is_answer = jnp.zeros(32, jnp.int32), jnp.zeros(32)
    tokens = tokens.at[: len(text)].set(jnp.asarray(text, jnp.int32))
    is_answer = is_answer.at[len(prompt) : len(text)].set(1.0)
    fresh = LoraAdapter.fresh(
        config, rank=RANK, targets=["q_proj", "v_proj", "up_proj", "down_proj"], seed=seed
    )
    stack = jax.tree.map(jnp.asarray, fresh.stack(rank=RANK, dtype=jnp.float32))
    state, losses = optimizer.init(stack), []
    for _ in range(num_steps):
        stack, state, loss = train_step(stack, state, base, tokens, is_answer)
        losses.append(float(loss))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return LoraAdapter.from_stack(config, stack)


# %% [markdown]
# Written as PEFT writes them, the adapters load wherever PEFT's do, and here.

# %%
folder = Path(tempfile.mkdtemp())
for seed, (name, answer) in enumerate(ANSWERS.items()):
    adapter = train(answer, seed)
    save_adapter(adapter, folder / name, base_model="two-layers")
    assert load_adapter(folder / name, config).digest == adapter.digest
    size = (folder / name / "adapter_model.safetensors").stat().st_size
    print(f"{name}: {size / 2**10:.0f} KiB")

# %% [markdown]
# Served together: every request names its adapter, or none. One prompt, three answers, and nothing
# shared between them; within an adapter the prompt is found in the cache.

# %%
engine = Engine(
    loaded,
    EngineConfig(
        max_loras=2,
        max_lora_rank=RANK,
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    ),
)
for name in ANSWERS:
    engine.load_adapter(name, folder / name)
params = SamplingParams(temperature=0, max_tokens=12)
names = [None, *ANSWERS]
for _ in range(2):
    answers = engine.generate([QUESTION] * 3, params, adapter=names)
    for name, answer in zip(names, answers, strict=True):
        print(f"{name}, {answer.num_cached_tokens} cached:{answer.text!r}")

# %% [markdown]
# Loaded again with other weights, a name stands for those at once, and finds nothing of the old.

# %%
engine.load_adapter("keeper", folder / "baker")
(answer,) = engine.generate(QUESTION, params, adapter="keeper")
print(f"reloaded, {answer.num_cached_tokens} cached:{answer.text!r}")
