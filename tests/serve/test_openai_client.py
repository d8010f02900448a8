"""What users of OpenAI's Python client see."""

import openai
import pytest

MODEL = "smollm2"
PROMPT = "The capital of France is"
CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France? Answer in one word."},
]


def completion(client, **fields):
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    return client.completions.create(**body | fields)


def chat(client, **fields):
    body = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_completion_tokens": 8}
    return client.chat.completions.create(**body | fields)


def test_a_completion_continues_the_prompt(client):
    answer = completion(client)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_chat_answers_as_the_assistant(client):
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content


def test_a_chat_ends_by_itself_without_a_limit(client):
    answer = chat(client, max_completion_tokens=openai.omit)
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content


def test_a_streamed_completion_is_the_whole_one_in_pieces(client):
    whole = completion(client)
    chunks = list(completion(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_chat_opens_with_the_role_and_closes_with_the_reason(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("create", [completion, chat])
def test_a_stream_ends_with_usage_where_it_is_wanted(client, create):
    whole = create(client)
    *others, last = create(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in others)


def test_the_second_request_finds_its_prompt_in_the_cache(client):
    text = "Of shoes and ships and sealing wax, of cabbages and kings. " * 4
    first = completion(client, prompt=text, max_tokens=2)
    second = completion(client, prompt=text, max_tokens=2)
    num_prompt = first.usage.prompt_tokens
    assert second.choices[0].text == first.choices[0].text
    assert first.usage.prompt_tokens_details.cached_tokens < num_prompt // 2
    # The last token is computed always: its logits are needed.
    assert num_prompt // 2 < second.usage.prompt_tokens_details.cached_tokens < num_prompt


def test_another_salt_shares_nothing(client):
    text = "The time has come, the walrus said, to talk of many things. " * 4
    completion(client, prompt=text, max_tokens=2)
    salted = completion(client, prompt=text, max_tokens=2, extra_body={"cache_salt": "a"})
    again = completion(client, prompt=text, max_tokens=2, extra_body={"cache_salt": "a"})
    other = completion(client, prompt=text, max_tokens=2, extra_body={"cache_salt": "b"})
    cached = [r.usage.prompt_tokens_details.cached_tokens for r in (salted, again, other)]
    assert cached[0] == cached[2] == 0 < cached[1]


def test_choices_are_the_answers_to_consecutive_seeds(client):
    both = completion(client, n=2, seed=7, temperature=1.0)
    alone = [completion(client, seed=seed, temperature=1.0) for seed in (7, 8)]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [a.choices[0].text for a in alone]
    assert both.choices[0].text != both.choices[1].text
    assert both.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert both.usage.completion_tokens == 16


def test_streamed_choices_keep_their_indices(client):
    whole = chat(client, n=2, seed=3, temperature=1.0)
    texts = ["", ""]
    for chunk in chat(client, n=2, seed=3, temperature=1.0, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_a_batch_of_prompts_is_answered_in_order(client):
    prompts = [PROMPT, "One, two, three, four,"]
    batch = completion(client, prompt=prompts, n=2, seed=0, temperature=0.7)
    alone = [completion(client, prompt=p, n=2, seed=0, temperature=0.7) for p in prompts]
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    expected = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in batch.choices] == expected
    assert batch.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)


def test_the_text_ends_before_a_stop_string(client):
    free = completion(client, max_tokens=16).choices[0].text
    word = free.split()[2]
    for stop in (word, ["never to be seen", word]):
        stopped = completion(client, max_tokens=16, stop=stop).choices[0]
        assert stopped.text == free[: free.index(word)]
        assert stopped.finish_reason == "stop"
    chunks = completion(client, max_tokens=16, stop=word, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == free[: free.index(word)]


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "octavo"


def test_errors_arrive_as_the_clients_exceptions(client):
    with pytest.raises(openai.NotFoundError) as not_found:
        completion(client, model="gpt-4")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        completion(client, suffix="end")
    assert refused.value.param == "suffix"
    assert "suffix" in refused.value.message


def test_best_of_shows_the_likeliest_of_the_choices(client):
    def mean(choice) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    every = completion(client, n=4, seed=5, temperature=1.0, logprobs=0)
    wanted = sorted(every.choices, key=mean, reverse=True)[:2]
    two = completion(client, n=2, best_of=4, seed=5, temperature=1.0)
    assert [choice.text for choice in two.choices] == [choice.text for choice in wanted]
    assert [choice.index for choice in two.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in two.choices)
    assert two.usage.completion_tokens == every.usage.completion_tokens


def test_a_beam_search_finds_several_answers(client):
    wide = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    found = completion(client, n=4, max_tokens=6, extra_body=wide)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in found.choices}) == 4
    again = chat(client, n=2, extra_body={"use_beam_search": True})
    assert len({choice.message.content for choice in again.choices}) == 2
