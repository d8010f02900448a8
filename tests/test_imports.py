"""Data flows one way, serve -> models -> paged -> pallas_kernels, and importing starts nothing.

The sources are read with `ast`, so that an import inside a function counts as well; what importing
really does is looked at in a process of its own.
"""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PEERS = {"peft", "torch", "transformers", "vllm"}
LAYERS = ("pallas_kernels", "paged", "models", "serve")  # each may import those before it
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What a file of each folder may import beside the standard library and octavo: names of modules, or
# of the extras of pyproject.toml that declare them ("" are the dependencies without an extra).
ARRAYS_ONLY = {"jax", "jaxlib", "numpy"}
EXTRAS = {
    "models": {"", "models"},
    "serve": {"", "serve"},
    "tests": {"", "test"},
    "benchmarks": {"", "test", "notebooks"},
}
# What arrays only may import all the same, when it is asked for.
WHEN_ASKED = {"pallas_kernels": "cpu", "paged": "remote"}
# What a declared distribution is a layer over, and pins: fastapi, pydantic, jax, numba.
UNDECLARED = {"starlette", "pydantic_core", "ml_dtypes", "llvmlite"}


def requirements(extra: str) -> set[str]:
    """The distributions that an extra declares, following octavo[...] into other extras."""
    declared = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    names = set()
    for requirement in declared:
        if nested := re.match(r"octavo\[(.+?)\]", requirement):
            names |= set().union(*(requirements(name.strip()) for name in nested[1].split(",")))
        else:
            names.add(normalised(re.split(r"[^\w.-]", requirement)[0]))
    return names


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def imports(path: Path) -> Iterator[tuple[int, int, str]]:
    """(line, level, dotted name) of every import; `from .. import a` gives (line, 2, "a")."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.level, node.module
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, node.level, alias.name) for alias in node.names)


def layer_violations(root: Path) -> list[str]:
    """Imports across the four packages that are absolute, or that go upwards."""
    found = []
    for rank, layer in enumerate(LAYERS):
        for path in sorted((root / layer).rglob("*.py")):
            for line, level, name in imports(path):
                where = f"{path.relative_to(root)}:{line}: imports {'.' * level}{name}"
                if level == 0 and name.split(".")[0] in ("octavo", *LAYERS):
                    found.append(f"{where}, which must be a relative import")
                elif level:
                    outside = level - len(path.relative_to(root).parts)
                    target = name.split(".")[0] if outside == 0 else layer
                    if outside > 0 or target not in LAYERS:
                        found.append(f"{where}, which is outside of the four packages")
                    elif LAYERS.index(target) > rank:
                        found.append(f"{where}, but {layer} may not import {target}")
    return found


def dependency_violations(root: Path) -> list[str]:
    """Imports of third-party modules that the folder may not use or that nothing declares."""
    distributions = metadata.packages_distributions()
    shared = {path.stem for path in (root / "benchmarks").glob("*.py")}
    found = []
    for folder in (*LAYERS, "tests", "benchmarks"):
        declared = set().union(*(requirements(extra) for extra in EXTRAS.get(folder, ())))
        for path in sorted((root / folder).rglob("*.py")):
            for line, level, name in imports(path):
                module = name.split(".")[0]
                if level or module in sys.stdlib_module_names or module in ("octavo", *LAYERS):
                    continue
                providers = {normalised(name) for name in distributions.get(module, [module])}
                if folder not in EXTRAS:
                    asked = requirements(WHEN_ASKED[folder]) if folder in WHEN_ASKED else set()
                    allowed = module in ARRAYS_ONLY or bool(providers & asked)
                    allowed |= bool(asked) and module in UNDECLARED
                else:
                    allowed = bool(providers & declared) or module in UNDECLARED
                    # Reference data and comparisons come from other libraries; nothing else does.
                    allowed |= folder == "benchmarks" and module in PEERS
                    # The kernels' cases, which tests and benchmarks have in common.
                    allowed |= folder in ("tests", "benchmarks") and module in shared
                if not allowed:
                    found.append(f"{path.relative_to(root)}:{line}: {folder} may not import {name}")
    return found


def environment_reads(root: Path) -> list[str]:
    """Places where merely importing a package would read the process's environment or argv."""
    found = []
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            for node in import_time_nodes(ast.parse(path.read_text(), str(path))):
                name = getattr(node, "attr", getattr(node, "id", None))
                if name in ("environ", "getenv", "argv"):
                    found.append(f"{path.relative_to(root)}:{node.lineno}: {name} at import")
    return found


def import_time_nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes that run when the module is imported: all but the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            defaults = [*child.args.defaults, *filter(None, child.args.kw_defaults)]
            now = [*child.decorator_list, *defaults]
        elif isinstance(child, ast.Lambda):
            now = []
        else:
            now = [child]
        for part in now:
            if isinstance(part, ast.expr | ast.stmt):
                yield part
            yield from import_time_nodes(part)


CHECKS = [layer_violations, dependency_violations, environment_reads]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sources_keep_the_rule(check):
    assert check(ROOT) == []


def test_the_sources_were_found():
    for layer in LAYERS:
        assert list((ROOT / layer).rglob("*.py")), f"no sources of {layer} under {ROOT}"


@pytest.mark.parametrize(
    ("check", "file", "source", "complaint"),
    [
        (layer_violations, "paged/a.py", "from ..models import x", "paged may not import models"),
        (layer_violations, "paged/a.py", "def f():\n    from .. import serve", "import serve"),
        (layer_violations, "pallas_kernels/op/a.py", "from ...paged import x", "import paged"),
        (layer_violations, "serve/a.py", "import octavo.paged", "must be a relative import"),
        (layer_violations, "serve/a.py", "from models import x", "must be a relative import"),
        (layer_violations, "serve/a.py", "from ..tests import x", "outside of the four"),
        (layer_violations, "serve/a.py", "from ... import x", "outside of the four"),
        (dependency_violations, "pallas_kernels/a.py", "import flax", "may not import flax"),
        (dependency_violations, "paged/a.py", "from chex import x", "may not import chex"),
        (dependency_violations, "pallas_kernels/a.py", "import redis", "may not import redis"),
        (dependency_violations, "models/a.py", "import fastapi", "may not import fastapi"),
        (dependency_violations, "serve/a.py", "def f():\n    import pytest", "import pytest"),
        (dependency_violations, "tests/a.py", "import ipykernel", "may not import ipykernel"),
        (dependency_violations, "tests/a.py", "import torch", "may not import torch"),
        (dependency_violations, "benchmarks/a.py", "import sglang", "may not import sglang"),
        (environment_reads, "models/a.py", "import os\nX = os.getenv('X')", "getenv at import"),
        (environment_reads, "serve/a.py", "class A:\n    x = environ['X']", "environ at import"),
        (environment_reads, "serve/a.py", "def f(x=sys.argv): ...", "argv at import"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, check, file, source, complaint):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    found = check(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(file)
    assert complaint in found[0]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("serve/a.py", "import os\nfrom fastapi import FastAPI\nfrom starlette import x"),
        ("serve/a.py", "from ..models import x\nfrom .. import paged\nfrom . import b"),
        ("serve/a.py", "def f():\n    return os.environ['HOME']"),
        ("models/a/b.py", "from ...pallas_kernels.op import x\nfrom ..c import d\nimport gguf"),
        ("pallas_kernels/op/a.py", "from jax.experimental import pallas\nfrom ..b import c"),
        ("tests/a.py", "import octavo.serve\nimport pytest, chex"),
    ],
)
def test_what_the_rules_allow_is_not_reported(tmp_path, check, file, source):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert check(tmp_path) == []


def run_python(script: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0, done.stderr


def test_importing_starts_nothing(tmp_path):
    """No JAX backend, no log handler, no thread, nothing printed, no change of the environment."""
    run_python(
        """
        import contextlib, io, logging, os, threading
        import flax.nnx
        from jax._src import xla_bridge  # no public way to ask without starting one

        def handlers():  # and levels, of every logger that has any
            loggers = [logging.root, *logging.root.manager.loggerDict.values()]
            loggers = [log for log in loggers if isinstance(log, logging.Logger)]
            return {(log.name, str(log.handlers), log.level) for log in loggers
                    if log.handlers or log.level}

        before = handlers(), dict(os.environ), threading.active_count()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            import octavo.pallas_kernels, octavo.paged, octavo.models, octavo.serve
        assert not xla_bridge.backends_are_initialized(), "an import started a JAX backend"
        assert (handlers(), dict(os.environ), threading.active_count()) == before
        assert out.getvalue() == ""
        """,
        tmp_path,
    )


def test_kernels_and_block_manager_load_nothing_but_jax_and_numpy(tmp_path):
    run_python(
        """
        import sys
        import jax, jax.experimental.pallas
        before = {name.split(".")[0] for name in sys.modules}
        import octavo.pallas_kernels, octavo.paged
        loaded = {name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
        loaded = {name for name in loaded if "octavo" not in name}
        assert not loaded, f"unexpected imports: {sorted(loaded)}"
        for name in ("flax", "optax", "fastapi", "tokenizers", "octavo.models", "octavo.serve"):
            assert name not in sys.modules, name
        """,
        tmp_path,
    )


def test_the_library_import_alone_needs_only_jax_flax_and_numpy(tmp_path):
    core = requirements("")
    extras = set().union(*map(requirements, PROJECT["optional-dependencies"])) - core
    by_module = metadata.packages_distributions()
    modules = {m for m, names in by_module.items() if {normalised(n) for n in names} & extras}
    # flax itself depends on these, whatever octavo's extras name too
    modules = sorted(modules - {"rich", "optax"})
    assert {"safetensors", "fastapi", "typer", "redis"} <= set(modules)
    run_python(
        f"""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {modules}:
                    raise ModuleNotFoundError(f"{{name}} belongs to an extra", name=name)

        sys.meta_path.insert(0, Absent())
        import octavo.pallas_kernels, octavo.paged, octavo.models, octavo.serve
        """,
        tmp_path,
    )
