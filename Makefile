# `make run` and `make test` do all the set-up that they need; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=
WORKERS ?= 6

.PHONY: help run simulate test test-all quick mutants e2e networks compat bench gpu gpu-first lint types docs check release clean

help:
	@echo "make run       a federated run in Flower's simulation runtime, 20 clients, digits"
	@echo "make simulate  the same in one process"
	@echo "make test      the fast tests, in some ten minutes on two cores; WORKERS=0 in one process"
	@echo "make test-all  all tests, in three quarters of an hour"
	@echo "make mutants   changes of eleven modules, and of the flags of methods, that no test notices; about two hours"
	@echo "make quick     the tests of single parts and of the properties"
	@echo "make e2e       only the tests of a deployment: SuperLink, reverse proxy (needs nginx), SuperNodes, signals"
	@echo "make networks  docs/deploy.md on hosts in network namespaces, with faults (root, Linux, nginx; ten minutes)"
	@echo "make compat    the oldest and the newest Flower that install: what is used of its private parts, a run, a deployment"
	@echo "make bench     speed and memory against peers, about a quarter of an hour; CHECK=--check fails on a missed bar"
	@echo "make gpu       the tests that need a GPU, and what a client's round takes on it"
	@echo "make gpu-first what needs a GPU, in ten minutes, as a table in docs/gpu.md"
	@echo "make docs      the documents as a site, build/site/index.html"
	@echo "make check     lint, types and all tests, which build the site: what CI runs"
	@echo "make release   sdist, wheel and app bundle into dist/, each run in an empty environment; Flower Hub's limits"
	@echo "make clean     remove the environment and caches, keep the runs"
	@echo 'Settings go into ARGS: make run ARGS="seed=1 heads=8"; all of them: $(BIN)/ravan-flwr simulate --help'

run: $(INSTALLED)
	@$(BIN)/ravan-flwr simulate --engine flower $(ARGS)

simulate: $(INSTALLED)
	@$(BIN)/ravan-flwr simulate $(ARGS)

# By file: fixtures are a file's. Every second worker begins with files that mostly wait for processes
# (tests/two_queues.py), beside which the others compute: more workers than the two cores that CI has.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

FOLDERS = tests/flower tests/processes tests/runs tests/properties tests/unit

test: WORKERS = 3
test: $(INSTALLED)
	$(PYTEST) --fast $(FOLDERS) $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) $(FOLDERS) $(ARGS)

mutants: $(INSTALLED)
	$(BIN)/python -m scripts.mutants $(ARGS)

# These wait for nothing: more workers would only import the libraries once more.
quick: WORKERS = 2
quick: $(INSTALLED)
	$(PYTEST) tests/properties tests/unit $(ARGS)

e2e: $(INSTALLED)
	$(BIN)/python -m pytest -v tests/flower/test_deployment.py tests/flower/test_deployment_faults.py \
		tests/flower/test_reverse_proxy.py tests/flower/test_secure.py tests/processes/test_signals.py $(ARGS)

networks: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -v -rs --durations=0 -m networks tests/networks $(ARGS)

# --no-deps: Flower 1.42 asks for a certifi that is newer than some indexes have.
FLOWERS ?= 1.41.0 1.42.0
compat: $(INSTALLED)
	@failed=0; for version in $(FLOWERS); do \
	  echo "Flower $$version"; \
	  test -d .compat/$$version || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target .compat/$$version flwr==$$version || { failed=1; continue; }; \
	  PYTHONPATH=$(CURDIR)/.compat/$$version:$(CURDIR) $(BIN)/python -m pytest -n 0 $(COMPAT) $(ARGS) || failed=1; \
	done; exit $$failed
COMPAT = tests/unit/test_flower_private.py tests/unit/server/test_superlink_calls.py tests/processes/test_deploy_files.py \
	tests/flower/test_flower.py tests/flower/test_deployment.py

bench: $(INSTALLED)
	@mkdir -p bench; failed=0; \
	$(BIN)/python benchmarks/layers.py --repetitions 5 --json bench/layers.json $(CHECK) || failed=1; \
	$(BIN)/python benchmarks/server.py --json bench/server.json $(CHECK) || failed=1; \
	$(BIN)/python benchmarks/many_clients.py --json bench/many_clients.json $(CHECK) || failed=1; \
	$(BIN)/python -m benchmarks.overhead --json bench/overhead.json $(CHECK) || failed=1; \
	$(BIN)/python -m benchmarks.cores --json bench/cores.json $(CHECK) || failed=1; \
	$(BIN)/python benchmarks/startup.py --runs 3 --json bench/startup.json $(CHECK) || failed=1; \
	$(BIN)/python -m benchmarks.rounds ray --runs 1 --steps 50 --json bench/rounds.json $(CHECK) || failed=1; \
	$(BIN)/python -m benchmarks.clients --runs 1 --json bench/clients.json $(CHECK) || failed=1; \
	exit $$failed

# -n 0: one process has the GPU to itself, and the tests that measure memory mean that.
gpu: $(INSTALLED)
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: make gpu: PyTorch " \
	+ torch.__version__ + " finds no GPU, expected one that nvidia-smi lists and a PyTorch built with CUDA")'
	$(BIN)/python -m pytest -n 0 -v -m gpu tests $(ARGS)
	@mkdir -p bench
	$(BIN)/python -m benchmarks.gpu --limit 3600 --page docs/gpu.md

gpu-first: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu --limit 600 --page docs/gpu.md $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

# Material's notice on its successor is no warning of ours.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: lint types test-all

release: $(INSTALLED)
	$(BIN)/python -m scripts.release

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: found no $(PYTHON); install Python 3.11 or newer," \
		"or name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11; run make PYTHON=python3.11"; exit 1; }
	@echo "Step 1 of 2: making the Python environment $(VENV) (some minutes in all; later runs skip this)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Step 2 of 2: pip installs the versions of constraints.txt into it: PyTorch, transformers, Flower," \
		"and the tools for tests and documents"
	@test -t 1 || quiet=--quiet; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@touch $@
	@echo "Installed"

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.fab
