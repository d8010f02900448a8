"""The mutants of decode on a CPU with Numba."""

from __future__ import annotations

from mutant_list import ATTENTION, Mutant


def decode(what: str, old: str, new: str, case: str) -> Mutant:
    return Mutant(
        what=f"Numba decode: {what}",
        file="paged_attention/numba_decode.py",
        old=old,
        new=new,
        tests=ATTENTION,
        select=f"matches and numba-{case}",
    )


NUMBA_MUTANTS = (
    decode("values for keys", "query[h] * row[h]", "query[h] * row[H + h]", "mixed"),
    decode("a key too many", "min(B, length - b * B)", "min(B, length - b * B + 1)", "mixed"),
    decode("the scale is dropped", "= score * scale", "= score", "scale"),
    decode(
        "a window one wider",
        "lens[s] - record[_WINDOW])",
        "lens[s] - record[_WINDOW] - 1)",
        "window",
    ),
    decode("a window forgotten within a block", "max(0, first - b * B)", "0", "window"),
    decode(
        "a new peak leaves the old sum", "total[n] *= shrink", "total[n] *= _ONE", "decode-long"
    ),
    decode(
        "a new peak leaves the old values",
        "values[h] *= shrink",
        "values[h] *= _ONE",
        "decode-long",
    ),
    decode("spans weigh the same", "exp(slot[H] - peak)", "exp(_ZERO)", "decode-long"),
    decode(
        "the last span is left out",
        "(end - 1) // record[_SPAN_BLOCKS] + 1)",
        "(end - 1) // record[_SPAN_BLOCKS])",
        "decode-long",
    ),
    decode("prompts decode as well", "starts[s] != 1", "starts[s] < 1", "mixed"),
    decode("another group's queries", "q[k * G + g]", "q[g]", "mixed"),
)
