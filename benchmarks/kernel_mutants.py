"""Break the kernels on purpose, one way at a time, and see that their tests notice.

    python benchmarks/kernel_mutants.py [--match TEXT]

Each mutant is a change of one place in a copy of the sources, and a selection of tests that must
fail with it (and pass without). Prints which were caught; exits with 1 if one was not, or if a
change no longer finds its place. GPU kernels are interpreted from JAX 0.12 on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
from mutant_list import MUTANTS, Mutant
from mutant_list_numba import NUMBA_MUTANTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "paged", "models", "serve")
COPIED = (*PACKAGES, "tests", "benchmarks")


@dataclass
class Copy:
    """The sources in a folder of their own, importable as octavo before the installed ones."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Copy:
        ignore = shutil.ignore_patterns("__pycache__", "results", "hf")
        for name in COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", folder)
        site = folder / "site" / "octavo"
        site.mkdir(parents=True)
        for name in PACKAGES:
            (site / name).symlink_to(folder / name)
        return cls(folder)

    def run(self, mutant: Mutant) -> tuple[int, str]:
        """Exit status of the mutant's tests on what the folder holds now, and their output.

        Kernels that wait for what never comes are stopped, with the status of a failure.
        """
        env = os.environ | {
            "PYTHONPATH": str(self.folder / "site"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "NPROC": "16",  # see tests/pallas_kernels/implementations.py
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--kernels",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"tests/pallas_kernels/{mutant.tests}", "-k", mutant.select]
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=200
            )
        except subprocess.TimeoutExpired:
            return 1, "stopped after 200 s"
        return done.returncode, done.stdout[-3000:] + done.stderr[-1000:]

    def apply(self, mutant: Mutant) -> str:
        """Change the source; returns what it was."""
        path = self.folder / "pallas_kernels" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times")
        path.write_text(text.replace(mutant.old, mutant.new))
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--match", default="", help="only mutants whose description contains this")
    args = parser.parse_args()
    can_interpret_gpus = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy.make(Path(folder))
        passed: set[tuple[str, str]] = set()
        for mutant in MUTANTS + NUMBA_MUTANTS:
            if args.match not in mutant.what:
                continue
            if "gpu" in mutant.file and not can_interpret_gpus:
                print(f"left out (JAX {jax.__version__}): {mutant.what}", flush=True)
                continue
            tests = (mutant.tests, mutant.select)
            if tests not in passed:
                status, output = copy.run(mutant)
                if status:
                    raise SystemExit(f"{output}\nwithout any mutant, {tests} exits with {status}")
                passed.add(tests)
            path = copy.folder / "pallas_kernels" / mutant.file
            original = copy.apply(mutant)
            status, output = copy.run(mutant)
            path.write_text(original)
            # 1 is a test that failed; anything else is no verdict.
            caught = status == 1
            print(f"{'caught' if caught else 'SURVIVED'}: {mutant.what}", flush=True)
            if not caught:
                print(output)
                survivors.append(mutant.what)
    print(f"{len(survivors)} survived" if survivors else "all were caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
