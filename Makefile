# make demo   see both rules at work (builds .venv first)
# make test   all checks: ruff, mypy, pytest with doctests
# make test-slow / test-gpu / test-oracle   what takes minutes / needs a CUDA device / compares with other packages
# make test-faults   kills, interleaves, starves and damages the commands; prints tried, survived, clear, silent
# make docs   the documentation site in site/: warnings are errors, examples run, links are checked
# make dist   both packages in dist/, tried in an empty environment
# make format

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready

.PHONY: demo test lint test-fast test-slow test-gpu test-oracle test-faults docs dist format clean

demo: $(READY)
	$(BIN)/trueup demo

test: lint test-fast

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# One thread a process: two worker processes with spinning thread pools would fight for the cores.
test-fast: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: $(READY)
	$(BIN)/pytest -m slow

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

# OpenCV and scikit-image come along; OpenCV wants system libraries that not every machine has.
test-oracle: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --editable "lab[oracle]"
	$(BIN)/pytest tests/lab/corruptions

# Full disks are tried where a tmpfs may be mounted, as root.
test-faults: $(READY)
	$(BIN)/python benchmarks/faults.py --out results/faults.csv

# Examples in pages and in docstrings run first.
docs: $(DOCS_READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest --doctest-glob="*.md" docs/*.md src
	rm -rf site
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env -d .venv/doctrees docs site
	$(BIN)/python docs/check_links.py site

dist: $(DOCS_READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist lab
	$(BIN)/python benchmarks/try_packages.py dist

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --editable 'lab[test]'
	touch $(READY)

$(DOCS_READY): $(READY) docs/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --constraint docs/constraints.txt \
		build --editable . --editable 'lab[docs]'
	touch $(DOCS_READY)
