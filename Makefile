# Two commands on a fresh machine: `make quickstart` and `make test`. Both need make and Python 3.11 or newer, nothing else.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
PYTEST_ARGS ?= -q -n auto --dist worksteal
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test test-fast test-range sim lint house wheel docs docs-run tests-map clean

# LoRA fine-tuning of the small model in examples/ with method mebp: accuracy, loss and memory before and after.
quickstart: $(VENV)/.installed
	$(VENV)/bin/blockwalk train examples/quickstart.yaml

# OMP_NUM_THREADS=1: pytest runs a worker on each core, so threads within a worker would only get in each other's way.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# What is computed without torch: plan, program, simulator, golden programs. Of these folders 95% of the branches are run.
test-fast: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m coverage run -m pytest $(PYTEST_ARGS) -m fast
	@$(VENV)/bin/python -m coverage combine --quiet
	@for folder in plan program simulate; do \
		$(VENV)/bin/python -m coverage report --include="*/blockwalk/$$folder/*" --fail-under=95 || exit 1; done

# The suite with the oldest and the newest supported versions, each in an environment of its own; writes docs/tested-with.md.
test-range:
	$(PYTHON) -m dev.test_range

# The simulated accelerator at length: every method in fifty orders.
sim: $(VENV)/.installed-dev
	BLOCKWALK_ORDERS=50 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/accelerator

# How large the house is and whether imports go one way; fails over the budget of dev/house.toml.
house:
	@$(PYTHON) dev/house.py

# Which tests cover a module.
tests-map:
	@$(PYTHON) dev/tests_map.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# Wheel and source distribution: built, each installed into a fresh environment, the quickstart trained there.
wheel: $(VENV)/.installed-dev
	$(VENV)/bin/python dev/wheel.py

# The documentation site, in build/site; a warning is an error, and so is a page of long sentences. Once mkdocs is there it needs no network.
docs: $(VENV)/.installed-dev
	@test -x $(VENV)/bin/mkdocs || $(PIP_INSTALL) -e '.[docs]'
	$(VENV)/bin/python dev/prose.py --longest
	$(VENV)/bin/mkdocs build --strict

# Every command line that README and docs show, but those that say what they need (# needs: hub); `make test` runs README's and the how-to pages'.
docs-run: $(VENV)/.installed-dev
	BLOCKWALK_DOCS_RUN=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/cli/test_pages.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found (make PYTHON=/path/to/python3)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed
