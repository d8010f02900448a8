# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # A tree of texts over one cache
#
# A sequence can be forked and each fork go on by itself: branches of an agent, a tree of thought.
# What they share is in memory once. A fork copies nothing; the first token that one of two forks
# writes to a block they share copies that block.

# %%
from octavo.models import load_model
from octavo.serve import Engine, EngineConfig, SamplingParams, generate_together

engine = Engine(
    load_model("smollm2"),
    EngineConfig(num_blocks=400, max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=32),
)
engine.warmup(lambda done, total, what: print(f"\r{done}/{total} {what:40}", end=""))

# %%
rules = "A story is told in short sentences. Each one says what happens next. " * 30
root = engine.sequence(f"{rules}\n\nThe boat left the harbour at night. Then")
root.generate(SamplingParams(temperature=0, max_tokens=4))
print("\ntokens of the root", len(root.token_ids), "blocks", engine.stats().num_active_blocks)

# %% [markdown]
# Three branches, each with a seed of its own, in one batch. The blocks they need beside the root's
# are those they write.

# %%
branches = [root.fork() for _ in range(3)]
print("blocks after three forks", engine.stats().num_active_blocks)
params = [SamplingParams(temperature=1, seed=seed, max_tokens=16, logprobs=0) for seed in range(3)]
before = engine.stats().prefilled_tokens
answers = generate_together(branches, params)
print("prompt tokens computed for them", engine.stats().prefilled_tokens - before)
print("blocks after their answers", engine.stats().num_active_blocks)

# %% [markdown]
# Each answer's mean log-probability stands for a judge; the best branch goes on, and the others
# are let go.


# %%
def mean_logprob(answer) -> float:
    chosen = zip(answer.token_ids, answer.logprobs, strict=True)
    return sum(place[token].logprob for token, place in chosen) / len(answer.token_ids)


scores = [mean_logprob(answer) for answer in answers]
for answer, score in zip(answers, scores, strict=True):
    print(f"{score:6.2f} {answer.text!r}")
best = branches[scores.index(max(scores))]
for branch in branches:
    if branch is not best:
        branch.release()

# %%
end = best.append(" At last").generate(SamplingParams(temperature=0, max_tokens=12))
print("cached", end.num_cached_tokens, "of", end.num_prompt_tokens)
print(best.text[len(rules) :].strip())

# %% [markdown]
# Released, they hold nothing. Their blocks stay cached until somebody needs the room.

# %%
best.release()
root.release()
print("active blocks", engine.stats().num_active_blocks)
