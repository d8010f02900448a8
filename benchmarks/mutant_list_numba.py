"""The mutants of what Numba compiles for CPUs: attention, products with weights, blocks copied."""

from __future__ import annotations

from dataclasses import replace

from mutant_list import ATTENTION, Mutant


def decode(what: str, old: str, new: str, case: str, file: str = "numba_decode.py") -> Mutant:
    return Mutant(
        what=f"Numba {'tiles' if file == 'numba_tiles.py' else 'decode'}: {what}",
        file=f"paged_attention/{file}",
        old=old,
        new=new,
        tests=ATTENTION,
        select=f"matches and numba-{case}",
    )


def tiles(what: str, old: str, new: str, case: str) -> Mutant:
    return decode(what, old, new, case, "numba_tiles.py")


def numbers(what: str, old: str, new: str, case: str = "matches and numba-mixed") -> Mutant:
    return Mutant(
        what=f"Numba tiles: {what}",
        file="paged_attention/numba_numbers.py",
        old=old,
        new=new,
        tests=ATTENTION,
        select=case,
    )


def pairs(what: str, old: str, new: str) -> Mutant:
    return numbers(f"pairs: {what}", old, new, "bfloat16_matches and mixed")


def linear(what: str, old: str, new: str, case: str = "product and numba") -> Mutant:
    return Mutant(
        what=f"Numba linear: {what}",
        file="linear/numba_call.py",
        old=old,
        new=new,
        tests="test_linear.py",
        select=case,
    )


def w8a8(what: str, old: str, new: str) -> Mutant:
    return replace(
        linear(f"w8a8: {what}", old, new, "product and numba and w8a8"),
        file="linear/numba_int8.py",
    )


def scatter(what: str, old: str, new: str) -> Mutant:
    return Mutant(
        what=f"Numba scatter: {what}",
        file="gather_blocks/numba_call.py",
        old=old,
        new=new,
        tests="test_small_ops.py",
        select="scattered and numba",
    )


NUMBA_MUTANTS = (
    scatter("the first layer's blocks", "+ 8 * words * numbers[0]", "+ 0 * numbers[0]"),
    scatter("blocks of one layer, side by side", "words * numbers[1]", "words"),
    scatter("the null block is written", "block_id == NULL_BLOCK", "block_id < 0"),
    scatter("the last word of odd blocks is left", "in range(words)", "in range(words - 1)"),
    scatter(
        "blocks in their order",
        "np.int64(ids[i]), np.int64(sources[i])",
        "np.int64(ids[i]), np.int64(i)",
    ),
    scatter("the last blocks are left", "+ record[_PER_ITEM] - 1)", "+ 0)"),
    scatter("every other line", "8 * words, _LINE)", "8 * words, 2 * _LINE)"),
    decode(
        "values for keys",
        "source, target = key + t * row + 4 * h,",
        "source, target = key + t * row + 4 * (head_size + h),",
        "mixed",
    ),
    decode(
        "keys for values", "begin * row + (head_size + h) * size", "begin * row + h * size", "mixed"
    ),
    decode(
        "another key's place",
        "(h * lines + place + t)",
        "(h * lines + t)",
        "mixed",
    ),
    decode(
        "a key too many",
        "min(num_keys, length - low * block_size)",
        "min(num_keys, length - low * block_size + 1)",
        "mixed",
    ),
    decode(
        "the scale is dropped", "scale_of(record) * _LOG2_E", "_LOG2_E * np.float32(0.125)", "scale"
    ),
    decode(
        "a window one wider", "length - record[WINDOW])", "length - record[WINDOW] - 1)", "window"
    ),
    decode("a window forgotten within a block", "max(0, first - low * block_size)", "0", "window"),
    decode(
        "a new peak leaves the old sum",
        "_fused(total[n], shrink,",
        "_fused(total[n], _ONE,",
        "decode-long",
    ),
    decode(
        "a new peak leaves the old values",
        "load(acc + 4 * h, value_width) * splat(shrink, value_width)",
        "load(acc + 4 * h, value_width)",
        "decode-long",
    ),
    decode(
        "the last value of a block is left out",
        "for _ in range(begin, end, per_word):",
        "for _ in range(begin, end - 1, per_word):",
        "mixed",
    ),
    decode(
        "weights of another head", "acc + 4 * n * head_size", "acc + 4 * k * head_size", "mixed"
    ),
    decode("spans weigh the same", "_power(slot[head_size] - top)", "_ONE", "decode-long"),
    decode(
        "powers of two by natural logarithms",
        "np.float32(math.log2(total[n]))) * _LN_2",
        "np.float32(math.log2(total[n])))",
        "mixed",
    ),
    decode(
        "the last span is left out",
        "spans = range(first, (end - 1) // record[SPAN_BLOCKS] + 1)",
        "spans = range(first, (end - 1) // record[SPAN_BLOCKS])",
        "decode-long",
    ),
    Mutant(
        what="Numba attention: blocks that do not exist are read",
        file="paged_attention/numba_record.py",
        old="0 <= block_id < num_blocks",
        new="True",
        tests=ATTENTION,
        select="outside and numba",
    ),
    decode("prompts decode as well", "num_queries != 1:", "num_queries < 1:", "mixed"),
    decode("another group's queries", "query + 4 * n * head_size", "query", "mixed"),
    tiles(
        "another head's keys",
        "key = kv + (block_of(table, b, pool) * num_kv_heads + k)",
        "key = kv + (block_of(table, b, pool) * num_kv_heads)",
        "mixed",
    ),
    numbers(
        "another head's values",
        "return kv + (block_of(table, b, pool) * num_kv_heads + k)",
        "return kv + (block_of(table, b, pool) * num_kv_heads)",
    ),
    numbers("keys for values", "k, sizes) + 4 * sizes[3], sizes[2]", "k, sizes), sizes[2]"),
    pairs("keys for values", "k, sizes) + 2 * head_size", "k, sizes)"),
    pairs("a value twice", "value + row + 2 * h, _LANES)", "value + 2 * h, _LANES)"),
    pairs("the first block's values", "(b - begin) * (block_size // 2) * 4", "0 * 4"),
    pairs("weights of every other key", "address + line, width)", "address, width)"),
    pairs(
        "the row below's values",
        "load_across(address, address + row,",
        "load_across(address, address,",
    ),
    replace(
        pairs("an odd first key is paired with the next one", "begin -= begin % per_word", "pass"),
        file="paged_attention/numba_decode.py",
        select="bfloat16_matches and window",
    ),
    replace(
        pairs("one product of two", "for is_upper in (True, False)", "for is_upper in (True,)"),
        file="vectors_bf16.py",
        tests="test_vectors_bf16.py",
        select="products and False",
    ),
    replace(
        pairs("numbers are cut off", "builder.add(odd, constant(0x7FFF))", "constant(0)"),
        file="vectors_bf16.py",
        tests="test_vectors_bf16.py",
        select="rounded",
    ),
    tiles("nothing is masked", "if is_masked:", "if False:", "mixed"),
    tiles(
        "the chunk of the first query is whole",
        "> high[0] + 1 or",
        "> high[0] + block_size or",
        "mixed",
    ),
    tiles("a window's first chunk is whole", "or begin * block_size < last_low", "", "window"),
    tiles("a window one wider", "high[i] - window + 1)", "high[i] - window)", "window"),
    tiles(
        "every query sees all",
        "if record[IS_CAUSAL] and s < record[S] else",
        "if False else",
        "mixed",
    ),
    tiles(
        "no query sees all",
        "if record[IS_CAUSAL] and s < record[S] else",
        "if True else",
        "not-causal",
    ),
    tiles(
        "the scale is dropped", "scale_of(record) * _LOG2_E", "_LOG2_E * np.float32(0.125)", "scale"
    ),
    tiles(
        "a new peak leaves the old sum",
        "load(total, width), shrink)",
        "load(total, width), splat(_ONE, width))",
        "prefill-over-tiles",
    ),
    tiles(
        "spans weigh the same",
        "power_of_two(own - top)",
        "power_of_two(own - own)",
        "prefill-over-tiles",
    ),
    tiles(
        "a new peak leaves the old values",
        "load(own, width) * shrink, ",
        "load(own, width), ",
        "prefill-over-tiles",
    ),
    tiles("weights of 2 to the power of natural logarithms", "* _LN_2", "* _ONE", "mixed"),
    tiles(
        "the last chunk is left out",
        "last_high // block_size + 1",
        "last_high // block_size",
        "mixed",
    ),
    tiles("results of another head", "k * group + i % group", "k * group", "mixed"),
    tiles(
        "lanes beyond the first square are another's",
        "place = query + h * line + 4 * begin",
        "place = query + h * line",
        "prefill-over-tiles",
    ),
    tiles(
        "tiles of a head in each other's place",
        "wide - 1 - index % wide",
        "index % 1",
        "prefill-over-tiles",
    ),
    linear("a piece in place of all", "total if is_first else", "total if True else"),
    linear(
        "an input too few",
        "count = min(most, inputs - begin)",
        "count = min(most, inputs - begin) - 1",
    ),
    linear(
        "the next row's number",
        "t3 = add_product(t3, x + 3 * x_row, line)\n        panel",
        "t3 = add_product(t3, x + 2 * x_row, line)\n        panel",
    ),
    linear("rows that make no four are left out", "while m < rows:", "while m + 4 <= rows:"),
    linear(
        "other bytes of a word",
        "store(memory + 2 * _LINE, load_bytes(source, 2",
        "store(memory + 2 * _LINE, load_bytes(source, 1",
    ),
    linear(
        "other bytes of a word, one row",
        "x + 8, load_bytes(source, 2",
        "x + 8, load_bytes(source, 1",
    ),
    linear("the first group's words", "at = panel * groups + group", "at = panel * groups"),
    linear(
        "the first group's words, one row",
        "at = panel * record[_GROUPS] + group",
        "at = panel * record[_GROUPS]",
    ),
    linear(
        "a group that is not full as if it were",
        "record[_ROWS] == 1 and count % GROUP == 0",
        "record[_ROWS] == 1",
    ),
    w8a8(
        "another row's number",
        "b3 = add_dots(a3, first, own), add_dots(b3",
        "b3 = add_dots(a2, first, own), add_dots(b3",
    ),
    w8a8("sums begin with nothing", "a = splat_word(x + _OFFSET)", "a = splat_word(x)"),
    w8a8(
        "another group's factor",
        "t2 = add_product(t2, x + 2 * row,",
        "t2 = add_product(t2, x + row,",
    ),
    w8a8(
        "a group that is not full has the row before's end",
        "source = address_of(last)",
        "source = x",
    ),
    w8a8(
        "a part of a panel for the other",
        "load_unsigned(weight + _PART), own)",
        "load_unsigned(weight), own)",
    ),
    linear("every tile has the first one's rows", "4 * rows[0] * inputs", "0 * inputs", "tiles"),
)
