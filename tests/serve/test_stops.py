"""Text comes out as soon as it is certain, never past a stop string, and never twice."""

from __future__ import annotations

import random

import pytest

from octavo.models import LoadedModel
from octavo.serve.stops import TextStream

TEXT = "One, two, three 🙂 — naïve café. ENDING is not END, END is."


def run(smollm2: LoadedModel, stop: tuple[str, ...], text: str = TEXT) -> tuple[list[str], bool]:
    stream = TextStream(smollm2.tokenizer.detokenizer(), stop)
    pieces = []
    for token in smollm2.tokenizer.encode(text):
        piece, stopped = stream.add(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    piece, stopped = stream.flush()
    return [*pieces, piece], stopped


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        ((), TEXT),
        (("nowhere",), TEXT),
        (("END",), TEXT[: TEXT.index("END")]),
        (("END, END",), TEXT[: TEXT.index("END, END")]),
        (("two, thr", "three"), TEXT[: TEXT.index("two")]),
        (("🙂",), TEXT[: TEXT.index("🙂")]),
        (("is.",), TEXT[:-3]),
        (("is.!",), TEXT),
        (("O",), ""),
    ],
)
def test_the_text_ends_before_the_first_stop_string(smollm2: LoadedModel, stop, want: str) -> None:
    pieces, stopped = run(smollm2, stop)
    assert "".join(pieces) == want
    assert stopped == (want != TEXT)


def test_what_may_become_a_stop_string_is_held_back(smollm2: LoadedModel) -> None:
    pieces, _ = run(smollm2, ("END, ENDED",))
    text = ""
    for piece in pieces[:-1]:
        text += piece
        assert not any(text.endswith("END, ENDED"[:n]) for n in range(1, 10))
    assert text + pieces[-1] == TEXT


def test_any_cut_of_any_text_is_found(smollm2: LoadedModel) -> None:
    rng = random.Random(0)
    for _ in range(60):
        begin = rng.randrange(len(TEXT) - 1)
        stop = TEXT[begin : begin + rng.randint(1, 9)]
        pieces, stopped = run(smollm2, (stop,))
        assert stopped and "".join(pieces) == TEXT[: TEXT.index(stop)]
