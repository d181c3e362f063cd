# make serve [CONFIG=...]   set up if needed, then serve
# make test                 set up if needed, then run the tests
# make help                 the rest

VENV    ?= .venv
PYTHON  ?= $(shell command -v python3.11 || command -v python3.10 || command -v python3)
CONFIG  ?= llama_tiny_cpu.yaml
ARGS    ?=
WORKERS ?= 2
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
KERNELS := agent/kernels/libllm_kernels.so
SOURCES := setup.py $(wildcard agent/kernels/*.cc agent/kernels/*.h agent/kernels/*/*.cc agent/kernels/*/*.h)

MINDFORMERS := $(VENV)/.mindformers-installed

.PHONY: setup setup-mindformers test-mindformers serve test test-sweeps lint bench docs clean help

setup: $(STAMP) $(KERNELS)

serve: setup
	@$(BIN)/python start_server.py --config $(CONFIG) $(ARGS)

test: setup lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(ARGS)

setup-mindformers: setup $(MINDFORMERS)

test-mindformers: setup-mindformers
	@$(BIN)/python -m pytest tests/mindformers_models $(ARGS)

test-sweeps: setup
	@$(BIN)/python -m pytest -m sweep $(ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: setup
	@$(BIN)/python performance/bench_kernels.py

docs: setup
	@$(BIN)/python tools/write_configuration_docs.py

clean:
	rm -rf build *.egg-info $(KERNELS) performance/ceilings .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@printf '%s\n' \
	  'make serve [CONFIG=llama_tiny_cpu.yaml] [ARGS="--set section.key=value"]' \
	  'make test [ARGS="-k scheduler"]      lint, types and tests' \
	  'make test-sweeps                     more combinations, which make test leaves out' \
	  'make setup                           virtual environment, pinned packages, kernels' \
	  'make setup-mindformers               and the packages that MindFormers'"'"' models need (0.6 GB)' \
	  'make test-mindformers                and their tests' \
	  'make bench                           kernels against the hardware ceilings' \
	  'make docs                            write docs/configuration.md from the code' \
	  'make clean                           remove what was built (not the virtual environment)'

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' || \
	  { echo "llm-serving needs Python 3.10 or 3.11; $(PYTHON) is $$($(PYTHON) -V 2>&1). Give one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "llm-serving needs a C++17 compiler (g++)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned packages into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

$(MINDFORMERS): requirements-mindformers.lock | $(STAMP)
	@echo "installing MindFormers into $(VENV) (once; about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock -r requirements-mindformers.lock
	@touch $@

$(KERNELS): $(SOURCES) | $(STAMP)
	@echo "compiling kernels"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
