# Everything is installed into .venv, and everything that runs keeps its files in .tideway.
#   PYTHON=python3.12   another Python to install with
#   ARGS="..."          options for the command behind a target, say: make up ARGS="--port 8001"
#   CALL, OUTPUT        of make gpu
PYTHON ?= python3
ARGS ?=
CALL ?=
OUTPUT ?=
BIN := .venv/bin
# Tools of tests and releases, apart from what Tideway needs.
TOOLS := .tideway/tools
# The short ones, which need no running Tideway.
BENCHES ?= planning dispatching stack gateway steps

# Else each process that a test starts compiles its sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help up down status test test-host compiled chart promtool test-emulated test-fast test-long test-engines check bench bench-coserving bench-coserving-short bench-ordering bench-rebalance \
	bench-migration bench-migration-gpu bench-migration-chaos bench-control-plane bench-fidelity bench-sharing \
	bench-placement soak lock sbom wheel bench-unified bench-peers gpu gpu-wheels clean install development

help:
	@echo "make up       install what is needed, start Tideway on http://127.0.0.1:8000 (Ctrl-C stops it)"
	@echo "              in the background: make up ARGS=--detach    all options: make up ARGS=--help"
	@echo "make down     stop a Tideway that runs in the background"
	@echo "make status   show processes, instances, models and queues"
	@echo "make test     the tests that need neither a GPU nor a container engine; make test-long: those that take longest"
	@echo "make test-emulated  those for a GPU, on an emulated one (make test has them too)"
	@echo "make test-fast  those that need no process, port or model: under a minute"
	@echo "make chart    the Helm chart alone: lint, template for each of its examples, alerts (with promtool where apt has it)"
	@echo "make check    formatting, lint, types, and import rules"
	@echo "make bench    the measurements in bench/"
	@echo "make bench-coserving        online and offline work together, 40 minutes; bench-coserving-short: 4 minutes"
	@echo "make bench-ordering         the order of requests of two models, in virtual time, 3.5 minutes"
	@echo "make bench-rebalance        requests that move, four instances in virtual time, about 2 hours"
	@echo "make bench-migration        pause of a request that moves, 256 to 8192 tokens; ARGS=pause: that alone"
	@echo "make bench-migration-gpu    the same and the transfer, on a GPU with the shape of Llama-2-7B"
	@echo "make bench-migration-chaos  2,000 moves with a fault each, about 20 minutes"
	@echo "make bench-control-plane    load reports of up to 1,024 instances to one scheduler, about 2 minutes"
	@echo "make bench-sharing          SeaLLM's evaluation on 32 simulated A800, about half an hour; ARGS=figure6: that alone"
	@echo "make bench-fidelity         simulated against live, two instances and three models, about 15 minutes"
	@echo "make bench-placement        the search's time and distance from the best plan, about 4 minutes; ARGS='day --day 5': others"
	@echo "make bench-unified          all parts against each of them switched off, 32 GPUs in virtual time; ARGS=live: here"
	@echo "make bench-peers            beside vLLM and llama.cpp on this CPU, about an hour; ARGS=--quick: 10 minutes"
	@echo "make soak     20 minutes of requests, operations and faults of all kinds, which must leave nothing behind; SECONDS=300: shorter"
	@echo "make gpu      all measurements that need a CUDA machine, within 9 minutes; ARGS=--quick: small shapes, on any machine"
	@echo "              CALL=1 to 5: one of the calls it is divided into; OUTPUT=FOLDER: where all results go"
	@echo "              ARGS='--resume FOLDER': what is done there is not run again"
	@echo "make gpu-wheels             what make gpu needs on a machine with torch alone, for .tideway/gpu there"
	@echo "make lock     requirements.lock, from constraints.txt: every package with its hashes"
	@echo "make wheel    dist/tideway-*.whl; make sbom: dist/tideway.cdx.json, what is installed, in CycloneDX's format"
	@echo "make clean    remove .venv, .tideway and caches"

install:
	@$(PYTHON) -I tideway/bootstrap.py

development:
	@$(PYTHON) -I tideway/bootstrap.py --extra development

up: export UP_ARGS := $(ARGS)
up:
	@$(PYTHON) -I tideway/bootstrap.py --for-up
	@exec $(BIN)/tideway up $(ARGS)

down status:
	@if [ -x $(BIN)/tideway ]; then exec $(BIN)/tideway $@ $(ARGS); else echo "Tideway is not installed here: make up"; fi

test: development
	@$(MAKE) --no-print-directory test-host
	@$(if $(ARGS),true,$(MAKE) --no-print-directory test-emulated)

# Tests wait for as long as they compute. Those of tests/e2e, live stacks of many processes, stay together on one of the four.
test-host: development
	$(BIN)/python -m pytest -n 4 -p no:schemathesis -m "not gpu and not container and not long" $(ARGS)

# What is marked gpu, on a CUDA device that is emulated. These hardly wait: beside others they have what those leave.
test-emulated: development
	nice -n 5 $(BIN)/python -m pytest -n 2 --dist worksteal -p tests.emulated_cuda.plugin -p no:schemathesis \
		-m "gpu and not long" tests/worker tests/emulated_cuda $(ARGS)

# Of all that tests import, what Python and pytest make of the sources: once, not in each of their processes. What fails here
# fails in those as well.
compiled: development
	@$(BIN)/python -m pytest -n 0 --collect-only -qq -p no:schemathesis >/dev/null || true

test-engines: development  # real vLLM, once `tideway engine install vllm` has made its environment
	$(BIN)/python -m pytest -n 0 -p no:schemathesis tests/worker/engines/test_vllm.py tests/worker/engines/test_vllm_images.py $(ARGS)

test-long: development
	$(BIN)/python -m pytest -n 2 -m "long and not gpu and not container" $(ARGS)
	@$(if $(ARGS),true,TIDEWAY_TEST_EXAMPLES=5 $(BIN)/python -m pytest -n 2 --dist worksteal -p no:schemathesis -m hypothesis tests/shared)
	@$(if $(ARGS),true,$(BIN)/python -m pytest -n 2 -p tests.emulated_cuda.plugin -p no:schemathesis -m "gpu and long" \
		tests/worker/kv_transport tests/worker/test_deterministic.py tests/worker/test_executor.py tests/worker/test_on_cuda.py)

test-fast: development
	$(BIN)/python -m pytest -n 2 --dist worksteal -m fast -p no:schemathesis $(ARGS)

chart: development promtool
	$(BIN)/python -m pytest -n 0 -p no:schemathesis tests/deploy $(ARGS)

# For the tests of the alerts, which are skipped without it: out of Debian's package, without installing that.
promtool:
	@[ -x $(TOOLS)/bin/promtool ] || command -v promtool >/dev/null || ! command -v apt-get >/dev/null || { \
		folder=$$(mktemp -d) && mkdir -p $(TOOLS)/bin && (cd $$folder && (apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; }) \
		&& dpkg-deb -x prometheus_*.deb .) >/dev/null 2>&1 && mv $$folder/usr/bin/promtool $(TOOLS)/bin/promtool \
		|| echo "promtool could not be had: tests of the alerts are skipped"; rm -rf "$$folder"; }

check: development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: development
	@set -e; for name in $(BENCHES); do echo "== bench/$$name.py"; $(BIN)/python -m bench.$$name; done

bench-coserving: development
	$(BIN)/python -m bench.coserving $(ARGS)

bench-coserving-short: development
	$(BIN)/python -m bench.coserving --short --model 30m --output .tideway/bench $(ARGS)

bench-ordering: development
	$(BIN)/python -m bench.ordering $(ARGS)

bench-rebalance: development
	$(BIN)/python -m bench.rebalance $(ARGS)

bench-migration: development
	$(BIN)/python -m bench.migration $(ARGS)

bench-migration-gpu: development
	$(BIN)/python -m bench.migration --device cuda --model llama-2-7b --output bench/results $(ARGS)

gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu $(if $(CALL),--call $(CALL)) $(if $(OUTPUT),--output $(OUTPUT)) $(ARGS)

gpu-wheels:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu.wheels $(ARGS)

bench-migration-chaos: development
	$(BIN)/python -m bench.migration_chaos $(ARGS)

bench-control-plane: development
	$(BIN)/python -m bench.control_plane $(ARGS)

bench-sharing: development
	$(BIN)/python -m bench.sharing $(ARGS)

bench-placement: development
	$(BIN)/python -m bench.placement $(or $(ARGS),speed optimum) --output bench/results

bench-fidelity: development
	$(BIN)/python -m bench.fidelity --output bench/results $(ARGS)

bench-unified: development
	$(BIN)/python -m bench.unified $(or $(ARGS),simulated) --output bench/results

soak: development
	$(BIN)/python -m bench.soak --seconds $(or $(SECONDS),1200) $(ARGS)

# uv and what else makes a release.
$(TOOLS)/bin/uv: Makefile
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet uv==0.13.9 cyclonedx-bom==7.5.0
	@touch $@

# Every package that is installed with another, and of each the hashes, for all platforms and Pythons: for a checkout, and in the
# same versions for each image. Without torch, of which there is a build for each device, and without what that brings: it comes
# from its own index first. The image for CUDA 13 has what goes with PyPI's torch, which is for CUDA 13.
COMPILE = $(TOOLS)/bin/uv pip compile --no-config --default-index https://pypi.org/simple --universal --python-version 3.11 \
	--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet
WITHOUT_TORCH = --excludes $(TOOLS)/without-torch
lock: $(TOOLS)/bin/uv
	@mkdir -p $(TOOLS)/cuda13
	echo torch > $(TOOLS)/without-torch
	$(COMPILE) --upgrade pyproject.toml locks/build.in locks/torch.in --extra development $(WITHOUT_TORCH) --constraint constraints.txt \
		--output-file requirements.lock
	$(COMPILE) pyproject.toml locks/build.in $(WITHOUT_TORCH) --constraint requirements.lock --output-file locks/base.lock
	for name in gateway placement; do \
		$(COMPILE) pyproject.toml --extra $$name $(WITHOUT_TORCH) --constraint requirements.lock --output-file locks/$$name.lock || exit; done
	$(COMPILE) pyproject.toml locks/torch.in --extra worker $(WITHOUT_TORCH) --constraint requirements.lock --output-file locks/worker.lock
	$(COMPILE) pyproject.toml locks/torch.in --extra cuda $(WITHOUT_TORCH) --constraint requirements.lock --constraint constraints.txt \
		--output-file locks/cuda12.lock
	sed "s/-cu12/-cu13/" pyproject.toml > $(TOOLS)/cuda13/pyproject.toml
	sed "s/-cu12/-cu13/" constraints.txt > $(TOOLS)/cuda13/constraints.txt
	grep -vE "^(cuda-|nvidia-)|-cu12==" requirements.lock | sed -n "s/^\([a-z0-9].*==[^\\]*\).*/\1/p" > $(TOOLS)/cuda13/locked.txt
	$(COMPILE) $(TOOLS)/cuda13/pyproject.toml --extra cuda --no-emit-package torch --constraint $(TOOLS)/cuda13/constraints.txt \
		--constraint $(TOOLS)/cuda13/locked.txt --output-file locks/cuda13.lock
	$(COMPILE) locks/nvcc13.in --no-deps --output-file locks/nvcc13.lock

# What a checkout has installed, in CycloneDX's format.
sbom: install $(TOOLS)/bin/uv
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --output-file dist/tideway.cdx.json

wheel: development
	@mkdir -p dist
	$(BIN)/pip wheel --no-deps --no-build-isolation --quiet --wheel-dir dist .

bench-peers: development
	$(BIN)/python -m bench.peers $(ARGS)

clean:
	@if [ -x $(BIN)/tideway ]; then $(BIN)/tideway down; fi
	rm -rf .venv .tideway .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
