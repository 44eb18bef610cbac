# Two commands do everything: `make demo` and `make test`. Set-up is a part of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
# What is installed is compiled where it is imported: much of it never is.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# Test processes with one thread each are faster than one process with several; 4 of them keep two
# processors busy while some wait for a child. Children start faster where bytecode is kept.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# All test files are imported once, so that their bytecode is there: test processes all begin at the
# same time, and each would compile everything. What takes one processor runs beside them, and says
# nothing but its last line unless it fails.
BESIDE := --no-print-directory
SAID = $(VENV)/.said-$@

# Other packages, which want a torch of their own: tests/hosts and benchmarks/hosts are about them.
HOSTS := .hosts
# ultralytics would look for a network, keep settings in the home folder, and install what it misses.
YOLO := YOLO_OFFLINE=1 YOLO_AUTOINSTALL=false YOLO_CONFIG_DIR=$(CURDIR)/$(HOSTS)
WITH_HOSTS := OMP_NUM_THREADS=1 $(YOLO) $(HOSTS)/bin/python
OF_HOSTS := $(subst /,.,$(basename $(wildcard benchmarks/hosts/*/run.py)))

.PHONY: demo test lint types imports tests stand-in soak bench gpu-check hosts docs site matrix clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[dev]'
	touch $@

$(PEERS): $(READY)
	$(INSTALL) -e '.[peers]'
	touch $@

$(HOSTS)/.ready: pyproject.toml benchmarks/hosts/requirements.txt
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -e '.[cli]' -r benchmarks/hosts/requirements.txt
	touch $@

# A test process that has died is not replaced: its test would run again, and end the next one too.
HANGS := -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true --max-worker-restart=0

# What runs on a GPU runs on a stand-in where there is none: processes of their own, because in those
# torch has a CUDA device.
CPU := --ignore=tests/devices --ignore=tests/gpu
STAND_IN := -p tests.devices.stand_in tests/devices tests/gpu

demo: $(READY)  ## train digits at batch 1024 in micro-batches of 64 and show the table
	$(BIN)/python -m benchmarks.mbs.demo.run

test: $(READY)  ## lint, types, layers, docs, tests: a seeded part of every large count
	$(MAKE) $(BESIDE) --jobs=2 imports lint
	$(MAKE) $(BESIDE) --jobs=3 tests stand-in types

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

tests: $(READY)
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder $(HANGS) $(CPU)  # a file's fixtures are made once

stand-in: $(READY)
	@$(PYTEST) -n 1 $(HANGS) $(STAND_IN) > $(SAID) || { cat $(SAID); exit 1; }
	@tail -n 1 $(SAID)

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	@$(PYTEST) --collect-only --quiet > $(SAID) || { cat $(SAID); exit 1; }

soak: $(READY)  ## the full counts, file by file: one that was interrupted goes on where it was
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.soak
	$(BIN)/python -m scripts.docs

bench: $(PEERS)  ## every table of README and docs, from the machine it runs on
	$(BIN)/python -m benchmarks.all
	$(BIN)/python -m scripts.docs

gpu-check: $(READY)  ## tests/gpu and the CUDA benchmarks; says so where there is no GPU
	$(BIN)/python -m benchmarks.platforms.gpu.run
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	  $(BIN)/python -m benchmarks.platforms.forecasts.run && \
	  $(BIN)/python -m benchmarks.mbs.speed.run --device cuda && \
	  $(BIN)/python -m benchmarks.outofcore.table1.run --device cuda --cap 16GiB && \
	  $(BIN)/python -m benchmarks.ucudnn.paper.run --device cuda --out benchmarks/ucudnn/paper/cuda && \
	  $(BIN)/python -m benchmarks.ucudnn.networks.run --device cuda --out benchmarks/ucudnn/networks/cuda; \
	else echo "no CUDA device here: the CUDA benchmarks were not run"; fi

hosts: $(HOSTS)/.ready $(READY)  ## other packages' networks and loops: tests/hosts, benchmarks/hosts (gigabytes)
	$(WITH_HOSTS) -m pytest tests/hosts
	@for run in $(OF_HOSTS); do echo $$run; $(WITH_HOSTS) -m $$run || exit 1; done
	$(BIN)/python -m scripts.docs

docs: $(READY)  ## write docs/api/, docs/benchmarks/, docs/papers.md and the tables of README from their sources
	$(BIN)/python -m scripts.docs

site: $(READY)  ## the documentation as a site: examples run, public names told, no broken link
	$(PYTEST) -q tests/repository/test_docs.py tests/repository/test_readme.py tests/repository/test_papers.py
	$(BIN)/python -m scripts.website

matrix: $(READY)  ## the tests that a version could break, with every Python and torch (gigabytes)
	$(BIN)/python -m scripts.matrix
	$(BIN)/python -m scripts.docs

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist site .matrix .hosts
