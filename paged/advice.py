"""How prompts could share more: what of them is reused, and what the rest is lost to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Tokens of a list of prompts, each held against those before it; an unlimited cache.

    The causes add up to `num_tokens`.

    Attributes:
        num_prompts, num_tokens: what was given.
        reused: found by whole blocks.
        copied: found beyond the last whole block that matched, by copying part of a block.
        last: of prompts that were there before as a whole, the last token, whose logits are needed.
        moved: seen before, but behind another beginning: a shared part behind one that varies.
        new: not seen before.
        divergences: `(position, prompts, moved tokens)`, for each position at which prompts leave
            what was seen before they come to something that was moved; most tokens first.
    """

    num_prompts: int
    num_tokens: int
    reused: int
    copied: int
    last: int
    moved: int
    new: int
    divergences: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        def share(count: int) -> str:
            return f"{count:,} ({count / max(self.num_tokens, 1):.1%})"

        lines = [
            f"{self.num_prompts:,} prompts, {self.num_tokens:,} tokens",
            f"  reused by whole blocks          {share(self.reused)}",
            f"  reused by copying in a block    {share(self.copied)}",
            f"  last tokens, always computed    {share(self.last)}",
            f"  seen behind another beginning   {share(self.moved)}",
            f"  not seen before                 {share(self.new)}",
        ]
        lines += [
            f"  {prompts:,} prompts leave what is cached at token {position}, and {moved:,} tokens "
            "behind it were seen before: put what varies there behind what is shared"
            for position, prompts, moved in self.divergences[:3]
        ]
        return "\n".join(lines)


def advise(prompts: Iterable[Sequence[int]], *, block_size: int = 16) -> Advice:
    """Account for every token of a list of prompts, in the order in which they come.

    Args:
        prompts: token ids; prompts of one namespace.
        block_size: tokens per block, B; what is shorter than a block is not looked for elsewhere.

    Raises:
        ValueError: `block_size` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1")
    # Blocks by parent and first token: those that share anything share that.
    children: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    windows: set[tuple[int, ...]] = set()
    total = Counter[str]()
    leaves: Counter[int] = Counter()
    moved_at: Counter[int] = Counter()
    count = 0
    for prompt in prompts:
        tokens = tuple(int(token) for token in prompt)
        count += 1
        if not tokens:
            continue
        node, found = 0, 0
        while found + block_size <= len(tokens):
            after = known.get((node, tokens[found : found + block_size]))
            if after is None:
                break
            node, found = after, found + block_size
        tail = tokens[found : found + block_size]
        beside = children.get((node, tail[0]), ()) if tail else ()
        copied = max((_shared(block, tail) for block in beside), default=0)
        last = int(found + copied == len(tokens))
        # The last token is taken from whichever found it.
        copied, whole = (copied - last, found) if copied else (0, found - last)
        moved = _seen(tokens[found + copied + last :], windows, block_size)
        total.update(reused=whole, copied=copied, last=last, moved=moved)
        total.update(new=len(tokens) - whole - copied - last - moved, tokens=len(tokens))
        if moved:
            leaves[found + copied] += 1
            moved_at[found + copied] += moved
        _insert(tokens, children, known, block_size)
        windows.update(tokens[i : i + block_size] for i in range(len(tokens) - block_size + 1))
    return Advice(
        num_prompts=count,
        num_tokens=total["tokens"],
        reused=total["reused"],
        copied=total["copied"],
        last=total["last"],
        moved=total["moved"],
        new=total["new"],
        divergences=tuple((at, leaves[at], moved) for at, moved in moved_at.most_common()),
    )


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _seen(tokens: tuple[int, ...], windows: set[tuple[int, ...]], block_size: int) -> int:
    """Tokens that lie in runs of a block or more that were seen before."""
    covered, end = 0, 0
    for i in range(len(tokens) - block_size + 1):
        if tokens[i : i + block_size] in windows:
            covered += i + block_size - max(end, i)
            end = i + block_size
    return covered


def _insert(
    tokens: tuple[int, ...],
    children: dict[tuple[int, int], list[tuple[int, ...]]],
    known: dict[tuple[int, tuple[int, ...]], int],
    block_size: int,
) -> None:
    node = 0
    for start in range(0, len(tokens), block_size):
        block = tokens[start : start + block_size]
        if (node, block) not in known:
            known[node, block] = len(known) + 1
            children.setdefault((node, block[0]), []).append(block)
        node = known[node, block]
