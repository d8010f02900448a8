"""Compile every Pallas kernel for chips that are not here, and write down what the compilers say.

    python benchmarks/kernels_static.py            # all; writes results/kernels_static.md
    python benchmarks/kernels_static.py --quick    # two cases on each chip, no file
    python benchmarks/kernels_static.py --chip h200 --match decode

Exits with 1 if a kernel fails to compile, or misses one of `TARGETS`. A case that a kernel refuses
by NotImplementedError is counted as refused. Needs JAX 0.12 and the packages that
`python benchmarks/deviceless.py` names.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.machinery
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "kernels_static.md"
GPUS = ("a100", "h200", "b200")
TPUS = ("v4", "v5e", "v5p", "v6e", "7x")
PROFILED = ("v6e", "7x")  # libtpu's model aborts on these kernels for the others
QUICK = ("decode-32/8x128-b16-s2x4096-bfloat16", "prefill-32/8x128-b16-s1x8192-bfloat16-t8192")

# (pattern of cases in the table, chip, figure) -> the most it may be. Modelled cycles are a ratio
# to the floor, or to what the array of the matrix units allows at this head size: for prefill at
# 8,192 tokens, from where on the targets for devices are set too.
TARGETS = {
    ("decode-*x64-*-bfloat16", "h200", "spill_bytes"): 0,
    ("decode-*x128-*-bfloat16", "h200", "spill_bytes"): 0,
    ("prefill-*x64-*-bfloat16-*", "h200", "spill_bytes"): 0,
    ("prefill-*x128-*-bfloat16-*", "h200", "spill_bytes"): 0,
    ("decode-*x128-*-bfloat16", "v6e", "ratio"): 1.15,
    ("decode-*x128-*-bfloat16", "7x", "ratio"): 1.3,
    ("prefill-*x128-*-bfloat16-t8192", "v6e", "array_ratio"): 1.5,
    ("prefill-*x128-*-bfloat16-t8192", "7x", "array_ratio"): 1.5,
}


def compile_cases(chip: str, names: Sequence[str]) -> None:
    """The child: a line of JSON before and after each case."""
    import deviceless  # before JAX
    from static_cases import all_cases

    cases = {case.name: case for case in all_cases()}
    platform = "tpu" if chip in TPUS else "gpu"
    facts = deviceless.chip_named(chip)
    for name in names:
        print(json.dumps({"start": name}), flush=True)
        case = cases[name]
        row: dict[str, Any] = {"case": name, "chip": chip, "in_table": case.in_table}
        row["op"] = case.op
        floor = case.floor_seconds(facts)
        row |= {"floor_us": floor * 1e6, "floor_cycles": floor * facts.clock_hz}
        if chip in TPUS and case.op == "prefill":
            row["array_cycles"] = case.array_seconds(facts) * facts.clock_hz
        row["bound"] = (
            "memory" if case.floor_bytes / facts.hbm_bytes_per_second == floor else "math"
        )
        try:
            compiled = deviceless.compile_for(chip, *case.program(platform))
        except NotImplementedError as error:
            row |= {"status": "refused", "reason": str(error)}
        except Exception as error:
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:2000]}
        else:
            row |= {"status": "compiled"} | vars(compiled)
            if not compiled.identity:
                row |= {"status": "failed", "reason": "the cache is laid out anew at each call"}
        print(json.dumps(row), flush=True)


def model_cycles(chip: str, names: Sequence[str]) -> None:
    """Another child, because libtpu cannot profile every kernel that it can compile."""
    import deviceless  # before JAX

    deviceless.profile_cycles()
    from static_cases import all_cases
    from tpu_cycles import modelled_cycles

    cases = {case.name: case for case in all_cases()}
    for name in names:
        print(json.dumps({"start": name}), flush=True)
        cycles = modelled_cycles(chip, cases[name])
        print(json.dumps({"case": name, "chip": chip, "cycles": cycles}), flush=True)


def search_path() -> list[Path]:
    """Where the compilers are, if not in the environment itself: JAX must not find them there
    when it is to run something, because it would look for their devices first."""
    return [path for path in (Path(sys.prefix) / "compilers",) if path.is_dir()]


def have_compilers() -> bool:
    """Whether this environment can compile for chips that are not here."""
    found = importlib.machinery.PathFinder.find_spec(
        "libtpu", [*map(str, search_path()), *sys.path]
    )
    return found is not None


def run_chip(chip: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of all cases, with modelled cycles where there are any."""
    rows = run_children("--child", chip, names)
    wanted = [
        row["case"]
        for row in rows
        if row.get("in_table")
        and row["status"] == "compiled"
        and row["op"] in ("decode", "prefill")
    ]
    cycles: dict[str, int | None] = {}
    if chip in PROFILED:
        found = run_children("--cycles", chip, wanted)
        cycles = {row["case"]: row.get("cycles") for row in found}
    for row in rows:
        if (value := cycles.get(row["case"])) is not None:
            row |= {"cycles": value, "ratio": value / row["floor_cycles"]}
            if "array_cycles" in row:
                row["array_ratio"] = value / row["array_cycles"]
    return rows


def run_children(mode: str, chip: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of all cases; a child that a kernel takes down is started again behind that kernel."""
    rows: list[dict[str, Any]] = []
    names = list(names)
    while names:
        child = subprocess.run(
            [sys.executable, __file__, mode, chip, *names],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, search_path()))},
        )
        lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        rows += [line for line in lines if "case" in line]
        done = {row["case"] for row in rows}
        started = [line["start"] for line in lines if "start" in line]
        if not started:
            raise RuntimeError(f"compiling for {chip} did not start:\n{child.stderr[-3000:]}")
        if started[-1] not in done:
            reason = f"exit status {child.returncode}: {child.stderr[-1500:]}"
            row = {"case": started[-1], "chip": chip, "status": "failed", "reason": reason}
            rows.append(row)
            done.add(started[-1])
        names = [name for name in names if name not in done]
    return rows


def missed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What fails, and which targets are missed or were not measured."""
    problems = []
    for row in rows:
        if row["status"] == "failed":
            problems.append(f"{row['case']} on {row['chip']}: {row['reason']}")
        if row["status"] != "compiled":
            continue
        for (pattern, chip, figure), most in TARGETS.items():
            if row["in_table"] and row["chip"] == chip and fnmatch(row["case"], pattern):
                value = row.get(figure)
                if value is None or value > most:
                    problems.append(f"{row['case']} on {chip}: {figure} {value} is above {most}")
    return problems


def cell(value: Any, scale: float = 1, digits: int = 0) -> str:
    return "" if value is None else f"{value / scale:,.{digits}f}"


def markdown(rows: Sequence[dict[str, Any]], versions: dict[str, str]) -> str:
    compiled = sum(row["status"] == "compiled" for row in rows)
    refused = [row for row in rows if row["status"] == "refused"]
    lines = [
        "# The kernels, compiled without a device",
        "",
        "Made by `python benchmarks/kernels_static.py` with "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f": {compiled} pairs of case and chip compiled, {len(refused)} refused by the kernel.",
        "",
        "Nothing here was measured on a device. The floor is the larger of the bytes of keys and",
        "values over the peak bandwidth, and the operations over the keys that are seen over the",
        "peak rate. Cycles are libtpu's static model at the clock assumed for the chip; it knows",
        "little of bandwidth, so that less than the floor means only that the kernel's own",
        "instructions are not the limit. Registers, spills and shared memory are ptxas' and",
        "Mosaic's, the most of any kernel in the program.",
        "",
        "Prefill on a TPU has a second, higher floor, the one that its target is set by: matrix",
        "units of 256 x 256 (v6e, 7x; 128 x 128 before) sum the scores of a head of 128 in half",
        "their depth whatever the kernel does, while the product with the values can use all of",
        "the array. At D = 128 that makes 1.5 times the plain floor, at D = 64 2.5 times. The",
        "exponentials alone, at the model's 1,024 a cycle, take 1.0 and 2.0 times the plain floor:",
        "less, but beside them.",
        "",
        "| case | chip | temp MiB | registers | spill bytes | shared KiB | modelled cycles "
        "| floor cycles | ratio | array floor cycles | ratio | floor us, bound |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if not row.get("in_table") or row["status"] == "failed":
            continue
        if row["status"] == "refused":
            lines.append(f"| {row['case']} | {row['chip']} | refused: {row['reason']} |||||||||")
            continue
        tpu = row["chip"] in TPUS
        lines.append(
            f"| {row['case']} | {row['chip']} | {cell(row['temp_bytes'], 2**20, 2)} "
            f"| {cell(row['registers'])} | {cell(row['spill_bytes'])} "
            f"| {cell(row['shared_bytes'], 1024)} | {cell(row['cycles'])} "
            f"| {cell(row['floor_cycles']) if tpu else ''} | {cell(row.get('ratio'), digits=2)} "
            f"| {cell(row.get('array_cycles'))} | {cell(row.get('array_ratio'), digits=2)} "
            f"| {cell(row['floor_us'], digits=1)}, {row['bound']} |"
        )
    lines += ["", "## Refused", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in refused:
        reasons.setdefault((row["reason"], row["case"]), []).append(row["chip"])
    lines += [f"- {case}: {', '.join(on)}: {reason}" for (reason, case), on in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chip", action="append", choices=[*GPUS, *TPUS], help="may be repeated")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="only two cases, and no file")
    parser.add_argument("--json", action="store_true", help="print the rows")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--cycles", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        compile_cases(args.child[0], args.child[1:])
        return 0
    if args.cycles:
        model_cycles(args.cycles[0], args.cycles[1:])
        return 0

    import deviceless
    from static_cases import all_cases

    versions = deviceless.versions(search_path())
    names = [case.name for case in all_cases() if args.match in case.name]
    if args.quick:
        names = [name for name in names if name in QUICK]
    chips = args.chip or [*TPUS, *GPUS]
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        per_chip = list(pool.map(lambda chip: run_chip(chip, names), chips))
    order = {name: i for i, name in enumerate(names)}
    rows = sorted((row for rows in per_chip for row in rows), key=lambda row: order[row["case"]])
    if args.json:
        print(json.dumps(rows))
    elif not args.quick and not args.match and not args.chip:
        RESULTS.write_text(markdown(rows, versions))
        print(f"wrote {RESULTS}")
    problems = missed(rows)
    counts = {s: sum(row["status"] == s for row in rows) for s in ("compiled", "refused", "failed")}
    print(f"(kernel, chip) pairs: {counts}", file=sys.stderr)
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
