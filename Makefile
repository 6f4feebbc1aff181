# Two commands on a fresh machine: `make serve` answers on port 30000, `make test` runs the tests.
#
#   PYTHON        interpreter for the environment, 3.11 or newer
#   TORCH_INDEX   package index with another build of torch, such as PyTorch's own index of CPU builds; for a new
#                 environment. Without it torch comes from pip's index: on Linux that is the build with CUDA
#   CONSTRAINTS   pins for pip; `make serve CONSTRAINTS=` takes the newest versions allowed
#   VENV_FLAGS    for `python -m venv`, e.g. --system-site-packages to use a torch that is installed already
#   WORKERS       processes of `make test`, for two cores: two often wait; each runs whole files of tests, 0 is one
#   PORT, ARGS    for `make serve`; ARGS also for `make test`, `make dev`, `make docs`, `make results`, `make bench`

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?=
VENV_FLAGS ?=
PORT ?= 30000
WORKERS ?= 5
ARGS ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SOURCES := $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all dev check ruff format spelling words layers mypy types docs results pins lowest links release golden bench soak clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(DEV_STAMP)  ## Create the environment with everything that tests and checks need.

serve: $(RUN_STAMP)  ## Serve the bundled demo model on PORT (30000); ARGS adds flags.
	@test -z '$(TORCH_INDEX)' || grep -qxF '$(TORCH_INDEX)' $(RUN_STAMP) || { \
		echo "make: $(VENV) was installed without this TORCH_INDEX; run make clean first" >&2; exit 1; }
	@echo "The command is $(BIN)/dovetail; your own model: $(BIN)/dovetail serve Qwen/Qwen3-0.6B"
	$(BIN)/dovetail serve --port $(PORT) $(ARGS)

test: $(DEV_STAMP)  ## Run the tests; ARGS adds pytest's arguments.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(DEV_STAMP)  ## Run the tests, also what is marked full; ARGS adds pytest's arguments.
	$(BIN)/python -m pytest --full -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

dev: $(DEV_STAMP)  ## Lint what changed and run the nearest tests for 8 s; ARGS=tests/parsers names a folder.
	@$(BIN)/python tests/packaging/dev.py $(ARGS)

check: ruff format spelling words layers mypy  ## Lint, format, spelling, words, layers and types; make -k check runs all.

ruff: $(DEV_STAMP)
	$(BIN)/ruff check .

format: $(DEV_STAMP)
	$(BIN)/ruff format --check .

spelling: $(DEV_STAMP)
	$(BIN)/codespell

words: $(DEV_STAMP)
	$(BIN)/python docs/site/check_words.py

layers: $(DEV_STAMP)
	$(BIN)/lint-imports

mypy: $(DEV_STAMP)
	$(BIN)/mypy

types: $(DEV_STAMP)  ## Check types with pyright too (needs node).
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(DEV_STAMP)  ## Build the documentation into build/site; any warning or dead link fails.
	$(BIN)/python docs/site/build_site.py $(ARGS)

results: $(DEV_STAMP)  ## Write the figures of README and docs; ARGS=out.json records what bench serve found first.
	$(BIN)/python docs/site/results.py $(ARGS)

release: $(DEV_STAMP)  ## Build dist/, check it, test the wheel on every Python here; ARGS=--draft before the release.
	CONSTRAINTS=$(abspath $(CONSTRAINTS)) $(BIN)/python tests/packaging/release.py $(ARGS)

pins: $(DEV_STAMP)  ## Write constraints.txt, and resolve it for every Python and system; ARGS=--check does the latter.
	$(BIN)/python tests/packaging/pins.py $(ARGS)

lowest: $(DEV_STAMP)  ## Install the lowest versions that Dovetail takes, and use it; ARGS=--pinned-torch leaves torch.
	$(BIN)/python tests/packaging/lowest.py $(ARGS)

links: $(DEV_STAMP)  ## Ask for every address of another host that the documentation names.
	$(BIN)/python docs/site/foreign_links.py

golden: $(DEV_STAMP)  ## Record what others rely on; refuses a break without a version bump or a signed fragment.
	$(BIN)/python tests/plugins/golden/update.py
	$(BIN)/python tests/guards/inventory.py --write

bench: $(DEV_STAMP)  ## Measure speed; ARGS adds the benchmark's arguments.
	$(BIN)/python tests/benchmarks/plugin_list.py
	$(BIN)/python tests/benchmarks/hook_calls.py
	$(BIN)/python tests/benchmarks/output.py
	$(BIN)/python tests/benchmarks/engine.py $(ARGS)

soak: $(DEV_STAMP)  ## Mixed work for an hour, or SOAK_S seconds: wrong answers, memory, files, threads; ARGS adds flags.
	$(BIN)/python tests/benchmarks/soak.py $(ARGS)

clean:  ## Remove the environment and all caches.
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one or set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || { \
		rm -rf $(VENV); echo "make: cannot create $(VENV); on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@# Older ones download whole packages to read their metadata.
	$(PIP) --quiet --upgrade pip

$(RUN_STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@$(BIN)/python tests/packaging/downloads.py $(SOURCES) -e .
	$(PIP) $(SOURCES) -e .
	@echo '$(TORCH_INDEX)' > $@

$(DEV_STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@$(BIN)/python tests/packaging/downloads.py $(SOURCES) -e '.[dev]'
	$(PIP) $(SOURCES) -e '.[dev]'
	@echo '$(TORCH_INDEX)' | tee $@ > $(RUN_STAMP)
