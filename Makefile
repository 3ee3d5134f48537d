# make run     the pipeline on params.yaml; ARGS="--dataset adult --epsilon 1" changes it
# make test    everything that is checked
# make soak    what takes a night: kills at random instants, schedulers, a year of weekly retrainings
# make docs    the site of documentation into site/: strict, links checked, reference made from the code
# make papers  every table and figure of the five papers; ARGS="000-table-2" runs one, ARGS="000-table-2 --full" by the paper's protocol
# make benchmarks    clipped gradients against other libraries; ARGS="--workloads W2,W3" chooses
# make figures what makes the code hard to read, counted; ARGS="../other ." compares two checkouts, ARGS=--names lists functions
# make gpu     on a machine with a GPU: the tests of sums and methods there, then the same comparison, to docs/results/gpu.md
# make server, make stop    a Prefect server in the background, what prefect.yaml deploys, and a worker; the server's end;
#              ARGS="--notify slack-webhook/oncall" says who is told of runs that need a person
# It needs git and Python 3.11; everything else goes into .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 4200
ARGS ?=

export PREFECT_HOME ?= $(CURDIR)/.prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 120
export DO_NOT_TRACK ?= 1
export DVC_NO_ANALYTICS ?= 1
export WANDB_DIR ?= $(CURDIR)/.wandb
export WANDB_DATA_DIR ?= $(CURDIR)/.wandb/data
export WANDB_CACHE_DIR ?= $(CURDIR)/.wandb/cache
export WANDB_CONFIG_DIR ?= $(CURDIR)/.wandb/config
export WANDB_ARTIFACT_DIR ?= $(CURDIR)/.wandb/artifacts
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: run test tests soak lint format docs papers benchmarks figures gpu server stop clean
.DEFAULT_GOAL := run

run:
	@test -e $(VENV)/installed || echo "Installing into $(VENV) first: about 2 GB, some minutes. Then the pipeline runs, for digits about a minute."
	@$(MAKE) --no-print-directory $(VENV)/installed
	@epsilonflow run $(ARGS)

test:
	# Side by side, as tests wait now and then.
	@$(MAKE) --no-print-directory -j 2 lint tests

tests: $(VENV)/installed-dev
	# For two cores, on which three processes take as long. What is compiled is kept for the next run.
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) # slow files first, so that none is long at the end

soak: $(VENV)/installed-dev
	pytest -m soak $(ARGS)
	pytest -m hypothesis --hypothesis-profile "other examples" $(ARGS)
	python -m tests.soak.kills
	python -m tests.soak.scheduler
	python -m tests.soak.year
	python -m tests.soak.fuzz
	python -m tests.soak.accounting
	python -m tests.soak.plans
	python -m tests.soak.faults
	python -m tests.soak.faults --weeks 52 --file comparisons/results/faults-year.csv

lint: $(VENV)/installed-dev
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format: $(VENV)/installed-dev
	ruff format .
	ruff check --fix .

papers: $(VENV)/installed-dev
	python -m comparisons.papers $(ARGS)

benchmarks: $(VENV)/installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[benchmarks]'
	python -m benchmarks $(ARGS)

figures: $(VENV)/installed-dev
	@python -m benchmarks.code_figures $(ARGS)

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict $(ARGS)

gpu: $(VENV)/installed-dev
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[benchmarks,models]'
	python -m benchmarks.gpu $(ARGS)

server: export PREFECT_API_URL = http://127.0.0.1:$(PORT)/api
server: $(VENV)/installed
	@epsilonflow server start --port $(PORT)
	@epsilonflow server deploy $(ARGS)
	@prefect worker start --pool local-pool

stop: $(VENV)/installed
	@epsilonflow server stop

clean:
	rm -rf $(VENV) .prefect .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build *.egg-info

$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epsilonflow needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

# compat: found by its path, so that a folder data/ of cards where a command runs does not stand before the package of that name
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt --config-settings editable_mode=compat -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	@touch $@ $(VENV)/installed
