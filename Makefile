# Everything starts here: `make` lists the targets. The first one that needs it sets up .venv, in one
# constrained pip call, and touches a stamp; until pyproject.toml or constraints.txt change, a second
# call does nothing.

PYTHON ?= python3#     another interpreter: make run PYTHON=python3.12
PIP_ARGS ?=#           more for pip, such as an index with CPU builds of torch
PROMPT ?= If the argument is#   what `make run` continues
SEED ?= 2#             with which draws; the same seed gives the same text
MODEL ?= smollm2#      what `make bench` measures

export PROMPT
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
NEEDS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test lab notebooks book book-check bench matrix museum fuzz batch-kills soak fetch doctor clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

run: $(VENV)/.base ## generate text with the bundled model
	@printf '%s' "$$PROMPT"
	@$(PY) -m spindle generate -m tiny -p "$$PROMPT" -n 60 \
	  --temperature 0.6 --top-p 0.9 --seed $(SEED)
	@echo
	@echo 'Next:  make lab                           the notebooks, which build this engine up'
	@echo '       make book                          the same as a site'
	@echo '       $(VENV)/bin/spindle fetch smollm2    a larger model: 93 MB to download'

test: $(VENV)/.dev ## what a change must pass: lint, types, tests, notebooks, book
	@$(PY) tests/check.py

# A thread that waits for another one holds its core meanwhile, by default for some milliseconds. Where
# a browser wants that core, a step takes several times as long. So it is to go to sleep sooner.
lab: $(VENV)/.dev ## open the notebooks in JupyterLab
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-10000} $(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/notebooks/00_tour.ipynb

notebooks: $(VENV)/.dev ## run all notebooks and store their outputs
	@$(PY) notebooks/execute.py

book: $(VENV)/.dev ## build the book into book/_build/html
	@$(PY) -m sphinx -b html -W --keep-going -j auto -c book . book/_build/html
	@echo 'Open book/_build/html/book/index.html'

book-check: book ## open every page of the book in Chromium, other hosts blocked; SHOTS=DIR for pictures
	@$(PY) book/check.py $(if $(SHOTS),--screenshots $(SHOTS))

bench: $(VENV)/.dev ## this engine beside the others that are installed
	@$(PY) -m spindle fetch $(MODEL)
	@$(PY) -m spindle bench peers -m $(MODEL)

matrix: $(VENV)/.dev ## every feature against references that know none of it; MINUTES=60 for long
	@OMP_NUM_THREADS=1 $(PY) tests/matrix/run.py $(if $(MINUTES),--long $(MINUTES))

museum: $(VENV)/.dev ## plant every fault of the museum, and see who notices
	@OMP_NUM_THREADS=1 $(PY) tests/museum/run.py

fuzz: $(VENV)/.dev ## 2,000 damaged files, 5,000 hostile calls, 240 kills
	@OMP_NUM_THREADS=1 $(PY) tests/fuzz/files.py --count 2000
	@OMP_NUM_THREADS=1 $(PY) tests/fuzz/calls.py --count 5000
	@OMP_NUM_THREADS=1 $(PY) tests/fuzz/kills.py --count 240

batch-kills: $(VENV)/.dev ## kill `spindle batch` ten times in a file of 2,000 lines, and join what is left
	@OMP_NUM_THREADS=1 $(PY) tests/fuzz/batch_kills.py --lines 2000 --kills 10

soak: $(VENV)/.dev ## 20,000 requests of all kinds through small pools
	@OMP_NUM_THREADS=1 $(PY) tests/fuzz/soak.py --count 20000

fetch: $(VENV)/.base ## bring smollm2 into the cache, once
	@$(PY) -m spindle fetch smollm2

doctor: $(VENV)/.base ## what is here, what is missing, and what that costs
	@$(PY) -m spindle doctor

clean: ## remove caches and the built book; the environment stays (rm -rf .venv)
	rm -rf book/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The environment: .base runs the package, .dev runs all of the above.

$(VENV)/.base: $(NEEDS) | $(VENV)/bin/pip
	@echo 'Installing spindle into $(VENV), once; torch alone takes minutes to download ...'
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(NEEDS) | $(VENV)/bin/pip
	@echo 'Installing spindle with its tests, notebooks and book into $(VENV), once ...'
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.base $@

$(VENV)/bin/pip:
	@$(PYTHON) -c '' || { \
	  echo "make: $(PYTHON) does not run: spindle needs Python 3.11 or newer; say which with" \
	    "make $(MAKECMDGOALS) PYTHON=path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$($(PYTHON) --version 2>&1) is too old: spindle needs 3.11 or newer; say which" \
	    "with make $(MAKECMDGOALS) PYTHON=path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "make: $(PYTHON) comes without venv; on Debian and Ubuntu the package python3-venv" \
	    "brings it" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
