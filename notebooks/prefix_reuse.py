# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What a prefix costs, once
#
# A long document and three questions about it. The first question pays for the document; the
# others find its blocks in the cache and pay for their own few tokens.

# %%
from time import perf_counter

from octavo.models import load_model
from octavo.serve import Engine, EngineConfig, SamplingParams

# A small engine: few programs to compile.
engine = Engine(
    load_model("smollm2"),
    EngineConfig(num_blocks=400, max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=32),
)
engine.warmup(lambda done, total, what: print(f"\r{done}/{total} {what:40}", end=""))

# %%
document = "The library opened at nine and every table near the windows was taken. " * 90
questions = ["When did it open?", "Which tables were taken?", "What opened at nine?"]
params = SamplingParams(temperature=0, max_tokens=12)


def ask(question: str) -> tuple[float, int, int]:
    """Seconds to the first token, prompt tokens, and those that came from the cache."""
    start = perf_counter()
    stream = engine.stream(f"{document}\nQuestion: {question}\nAnswer:", params)
    first = next(stream)
    seconds = perf_counter() - start
    *_, last = first, *stream
    return seconds, last.num_prompt_tokens, last.num_cached_tokens


print("\n  TTFT  prompt  cached")
for question in questions:
    seconds, prompt, cached = ask(question)
    print(f"{seconds:5.2f}s {prompt:7} {cached:7}")

# %% [markdown]
# Where the blocks are now: none is active, for nobody is running; those of the document stay
# cached until somebody needs the room.

# %%
stats = engine.stats()
print(f"free {stats.num_free_blocks}, cached {stats.num_cached_blocks}, ", end="")
print(f"active {stats.num_active_blocks} of {stats.num_blocks}")

# %% [markdown]
# Questions that arrive together cost one prefill of their common prefix too: the others wait for
# the leader's blocks. `cache_salt` and everything else that changes keys and values keep caches
# apart. Why a prompt hits as far as it does, the engine can say.

# %%
before = engine.stats().prefilled_tokens
other = "Rain fell for three days, and on the fourth the river rose above the lower road. " * 40
answers = engine.generate([f"{other} Question: {q}" for q in questions], params)
print("prompt tokens", sum(answer.num_prompt_tokens for answer in answers))
print("computed     ", engine.stats().prefilled_tokens - before)

# %%
print(engine.explain(f"{document}\nQuestion: When did it close?\nAnswer:"))
print(engine.explain(document, cache_salt="another tenant"))
