"""How many answers of the demo model, asked for by JSON schema at temperature 1, are valid.

    python benchmarks/structured.py            # 200 answers
    python benchmarks/structured.py --count 20

The schemas bound every text and list, so that each answer can end. What is valid is judged by the
package jsonschema. Leaves with 1 if an answer is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import jsonschema

from octavo.models import load_model
from octavo.serve import Completion, Engine, EngineConfig, SamplingParams, StructuredOutputs

_TEXT = {"type": "string", "maxLength": 40}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {
            "anyOf": [
                {"type": "null"},
                {"type": "string", "pattern": "^[a-z]{1,16}@[a-z]{1,16}[.]org$"},
            ]
        },
    },
    "required": ["name", "age", "email"],
    "additionalProperties": False,
}
_TASKS: list[tuple[str, dict[str, Any]]] = [
    ("Describe a person you know.", _PERSON),
    (
        "Which city is the capital of France, and how large is it?",
        {
            "type": "object",
            "properties": {
                "city": _TEXT,
                "size": {"enum": ["small", "medium", "large"]},
                "facts": {"type": "array", "items": _TEXT, "maxItems": 3},
            },
            "required": ["city", "size", "facts"],
            "additionalProperties": False,
        },
    ),
    (
        "Who works on the library?",
        {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
    ),
    (
        "Plan a walk.",
        {
            "type": "object",
            "properties": {
                "date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
                "stops": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "place": _TEXT,
                            "minutes": {"type": "integer", "minimum": 0, "maximum": 600},
                        },
                        "required": ["place"],
                        "additionalProperties": False,
                    },
                    "minItems": 1,
                    "maxItems": 3,
                },
                "rain": {"type": "boolean"},
            },
            "required": ["date", "stops", "rain"],
            "additionalProperties": False,
        },
    ),
]


def fault(answer: Completion, schema: dict[str, Any]) -> str | None:
    """What is wrong with an answer, if anything."""
    if answer.finish_reason != "stop":
        return f"ended by {answer.finish_reason}: {answer.text!r}"
    try:
        jsonschema.validate(json.loads(answer.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}: {answer.text!r}"
    return None


def main() -> int:
    """Count them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=200, help="answers")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    loaded = load_model(args.model)
    engine = Engine(loaded, EngineConfig(max_model_len=1024, max_num_seqs=16, kv_cache_gib=1.0))
    prompts, params = [], []
    for i in range(args.count):
        question, schema = _TASKS[i % len(_TASKS)]
        text = f"{question} Answer in JSON."
        if loaded.chat_template is not None:
            text = loaded.chat_template.render([{"role": "user", "content": text}])
        prompts.append(loaded.tokenizer.encode(text, add_special_tokens=False))
        form = StructuredOutputs(json=schema)
        params.append(
            SamplingParams(temperature=1.0, seed=i, max_tokens=512, structured_outputs=form)
        )
    begin = time.perf_counter()
    answers = engine.generate(prompts, params)
    seconds = time.perf_counter() - begin
    faults = [fault(answer, _TASKS[i % len(_TASKS)][1]) for i, answer in enumerate(answers)]
    for i, found in enumerate(faults):
        if found is not None:
            print(f"answer {i}: {found}", file=sys.stderr)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(
        f"{faults.count(None)} of {args.count} answers are valid; {num_tokens} tokens, "
        f"{len({answer.text for answer in answers})} different texts, {seconds:.0f} s"
    )
    return 0 if not any(faults) else 1


if __name__ == "__main__":
    raise SystemExit(main())
