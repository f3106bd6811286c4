# `make help` lists the targets. Needs make and Python 3.10 or newer; everything else is set up in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# The interpreter that .venv is made with.
PYTHON ?= python3
# The backend that `make demo` uses.
BACKEND ?= tcp
# More arguments for the command that a target runs, as in: make test ARGS="-k routing"
ARGS ?=

# Tests start hundreds of processes: none should have to compile what another has compiled.
unexport PYTHONDONTWRITEBYTECODE

# In each of them, a thread of numpy's linear algebra would spin for a while, although none computes any.
test again soak: export OPENBLAS_NUM_THREADS := 1

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --no-input --disable-pip-version-check $(if $(CI),--quiet) \
       --constraint constraints.txt --no-build-isolation

# What a plugin needs beside itself to run here: the extra that brings its library.
EXTRA_mooncake := [non-cuda]
EXTRA_ascend := [npu]
PLUGINS := nixl mooncake mori ascend etcd bench conformance explain
TOOLS := codespell grafana-foundation-sdk greenlet hypothesis import-linter kubernetes-validate mypy opentelemetry-sdk pytest-timeout pytest-xdist python-json-logger pyyaml ruff

PROJECTS := core/pyproject.toml adapters/sglang/pyproject.toml adapters/vllm/pyproject.toml examples/demo/pyproject.toml
PLUGIN_PROJECTS := $(PLUGINS:%=plugins/%/pyproject.toml)

# Stamps: what was installed, so that a second run has nothing to do.
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
DEMO := $(VENV)/.stamp-demo-$(BACKEND)
DOCS := $(VENV)/.stamp-docs
# A backend of this repository is installed from it; any other is taken as it is installed.
DEMO_PLUGIN := $(wildcard plugins/$(BACKEND)/pyproject.toml)

$(BIN)/python:
	@PYTHON="$(PYTHON)" tools/make-venv.sh $(VENV)

$(BASE): $(BIN)/python constraints.txt
	$(PIP) hatchling editables
	@touch $@

# One command for each: pip then finds one torch that satisfies everything that asks for it.
$(DEV): $(BASE) $(PROJECTS) $(PLUGIN_PROJECTS) Makefile
	$(PIP) -e "core[opentelemetry,plot,prometheus,verify]" -e adapters/sglang -e adapters/vllm -e examples/demo $(foreach name,$(PLUGINS),-e "plugins/$(name)$(EXTRA_$(name))") $(TOOLS)
	@touch $@

$(DEMO): $(BASE) $(PROJECTS) $(DEMO_PLUGIN)
	$(PIP) -e core -e examples/demo $(if $(DEMO_PLUGIN),-e "plugins/$(BACKEND)$(EXTRA_$(BACKEND))")
	@touch $@

$(DOCS): $(DEV) constraints.txt
	$(PIP) furo myst-parser sphinx
	@touch $@

# What the tests print, and what the conformance kit found.
FOUND := build/tests

.PHONY: help setup demo check test again matrix docs third-party release-check soak bench figures gpu engine-sglang engine-sglang-smoke \
  engine-sglang-bench engine-sglang-differences engine-vllm engine-vllm-smoke engine-vllm-bench engine-vllm-differences \
  engine-cross engine-cross-smoke engine-dynamo engine-dynamo-smoke engine-window conform-mori try-sglang try-vllm fix clean distclean libraries

help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
	  printf '  %-14s %s\n' "$$name" "$$text"; done

setup: $(DEV) libraries ## Set up .venv with the core, every plugin, the demo and the tools

# Without root, the tests that need what is missing are skipped and say so; CI takes no skip for an answer.
libraries: $(BASE)
	@tools/mooncake-libraries.sh $(BIN)/python || [ "$${CI:-}" != true ]
	@tools/etcd-server.sh || [ "$${CI:-}" != true ]
	@$(BIN)/python -m plugins.ascend.standin.driver || [ "$${CI:-}" != true ]

demo: $(DEMO) ## Hand real requests from prefill to decode: make demo BACKEND=tcp|nixl|mooncake
	$(if $(filter mooncake,$(BACKEND)),@tools/mooncake-libraries.sh $(BIN)/python)
	@$(BIN)/statelink demo --backend $(BACKEND) $(ARGS)

check: $(DEV) ## Run every static check: ruff, format, mypy, import rules, private modules in tests, names, spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy $(wildcard core/src core/tests plugins/*/src plugins/*/tests plugins/ascend/standin adapters/*/src adapters/*/tests \
	  adapters/testing docs/conf.py $(wildcard examples/*.py) examples/demo/src examples/demo/tests tests benchmarks tools)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.private_modules tests core/tests $(wildcard plugins/*/tests) \
	  $(wildcard adapters/*/tests) adapters/testing examples benchmarks --without tests/model --without benchmarks/fast_paths.py
	$(BIN)/python -m tools.names core/src/statelink $(wildcard plugins/*/src/statelink_* adapters/*/src/statelink_*)
	$(BIN)/codespell
	@$(BIN)/python -m tools.sizes

# Every test runs in one of five processes, since tests wait more than they compute; a file's tests stay in one process.
# The long files come first, by `testpaths` and tests/conftest.py, so that no process ends with one of them. A choice of tests
# runs in one process.
WHOLE := --numprocesses=5 --dist=loadfile --no-loadscope-reorder --statelink-report=$(FOUND)/report.json

test: setup ## Run every test but the long ones: make test ARGS="-k routing"
	$(if $(ARGS),,rm -rf $(FOUND))
	$(BIN)/python -m pytest $(or $(ARGS),$(WHOLE))

# For CI alone: a test that passes here has failed beside the others, and waits for time instead of for what it means.
again: $(DEV)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none --statelink-report=$(FOUND)/again.json

matrix: $(DEV) ## Write docs/matrix.md, what moves over what, from the last whole `make test` and `make conform-mori`
	$(BIN)/python -m tools.matrix $(FOUND)/*.json $(if $(CI),,--write)

# Strict: a page that is in no list of docs/index.md, a link or an anchor that leads nowhere, and a name in a docstring that is
# not documented are errors. Sphinx makes a page of source again only after its module has changed, whatever links to it.
docs: $(DOCS) ## Build the documentation site: build/docs/index.html
	@rm -rf build/docs/_modules
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky --fresh-env -d build/docs-cache docs build/docs

# Type-checked from outside, against the core that is installed there.
third-party: $(DEV) ## Install a backend as a third party would, into a venv of its own, and run its tests
	tools/third-party.sh build/third-party
	for package in $(abspath examples/backend-shm examples/backend-procmem build/third-party/first); do cd $$package && $(abspath $(BIN))/mypy \
	  --python-executable $(abspath build/third-party)/venv/bin/python --cache-dir $(abspath build/third-party)/mypy; done

# Over the plugin's library; where that cannot run, over what stands in for it, which the last lines name. The kit's file
# takes longest, so the others run beside it.
CONFORM := $(filter-out conform-mori,$(PLUGINS:%=conform-%))
.PHONY: $(CONFORM)
$(CONFORM): conform-%: setup
	$(BIN)/python -m pytest plugins/$*/tests $(or $(ARGS),--numprocesses=3 --dist=loadfile)

# In an environment of its own, with the one Python that MoRI has wheels for. Where that is not there, only CI fails. VERSION
# names another release than the newest.
MORI_TESTS = $(or $(ARGS),--numprocesses=3 --dist=loadfile $(if $(VERSION),,--statelink-report=$(FOUND)/mori.json))
conform-mori: setup ## Run the real MoRI, over a stand-in for its network card: the plugin's tests, and the conformance kit
	$(if $(ARGS),,@rm -f $(FOUND)/mori.json)
	@python=$$(PYTHON3_10="$(PYTHON3_10)" tools/mori-env.sh $(VERSION)) || { rc=$$?; \
	  if [ "$$rc" = 3 ] && [ "$${CI:-}" != true ]; then echo "skipped: MoRI cannot be had here"; exit 0; fi; exit "$$rc"; }; \
	STATELINK_TEST_REQUIRE=mori "$$python" -m pytest plugins/mori/tests $(MORI_TESTS)

release-check: $(DEV) ## Once a release: build every distribution from a clean tree, look into it, install and try it
	$(BIN)/python -m tools.release_check $(ARGS)

soak: setup ## Run the long tests
	$(BIN)/python -m pytest -m soak --timeout=0 -o faulthandler_timeout=0 $(ARGS)

# Everything that the tables of docs/performance.md are made from takes some forty minutes with ROUNDS=1.
# With ARGS, a part of the first command runs alone.
BENCH_ROUNDS = $(if $(ROUNDS),--rounds $(ROUNDS))
bench: setup ## Measure, and write build/bench: make bench ROUNDS=3, make bench ARGS="--help"
	$(BIN)/python -m benchmarks $(BENCH_ROUNDS) $(ARGS)
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory engine-sglang-bench engine-vllm-bench ARGS="$(BENCH_ROUNDS)"
	@$(MAKE) --no-print-directory engine-vllm-bench ARGS="--moves $(BENCH_ROUNDS)"
	@$(MAKE) --no-print-directory engine-vllm-bench ARGS="--conversations $(BENCH_ROUNDS)"
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m benchmarks.overlap $(BENCH_ROUNDS); \
	  $(MAKE) --no-print-directory engine-sglang-bench engine-vllm-bench ARGS="--after-forward $(BENCH_ROUNDS)"; \
	  else echo "skipped: the overlap and --after-forward need root, for their network namespaces"; fi
	$(BIN)/python -m tools.figures --table build/bench
endif

figures: $(DEV) ## Write what `make bench` found into benchmarks/measured.json and the docs
	$(BIN)/python -m tools.figures --take build/bench --write

# Offline where setup has run; on a machine that is lent for minutes, run a part at a time: ARGS="--part kit-nixl".
gpu: ## Run what needs a graphics card; without one, say what would run
	$(BIN)/python -m tools.gpu $(ARGS)

# In an environment of its own, which is kept in the user's cache. Where no interpreter is new enough, only CI fails.
# VERSION names another release of the engine than the newest. PREFILL and DECODE name those of the servers of a pair.
ENGINE_SIDE = $(if $($(2)),STATELINK_$(2)_PYTHON=$$(realpath -s "$$(PYTHON="$(PYTHON)" tools/engine-env.sh $(1) $($(2)))"); \
  export STATELINK_$(2)_PYTHON;)
ENGINE_PYTHON = python=$$(PYTHON="$(PYTHON)" tools/engine-env.sh $(1) $(or $(3),$(VERSION))) || { rc=$$?; \
    if [ "$$rc" = 3 ] && [ "$${CI:-}" != true ]; then echo "skipped: $(1) needs Python 3.11 or newer"; exit 0; fi; exit "$$rc"; }; \
  tools/mooncake-libraries.sh "$$python" || [ "$${CI:-}" != true ]; export $(2)
ENGINE_TESTS = "$$python" -W ignore -m pytest -c adapters/$(1)/pyproject.toml --rootdir adapters/$(1) adapters/$(1)/tests
SGLANG_PYTHON = $(call ENGINE_PYTHON,sglang,STATELINK_ABSENT_PACKAGES=1)
ENGINE_SGLANG = $(SGLANG_PYTHON); $(call ENGINE_SIDE,sglang,PREFILL) $(call ENGINE_SIDE,sglang,DECODE) $(call ENGINE_TESTS,sglang)
VLLM_PYTHON = $(call ENGINE_PYTHON,vllm,VLLM_TARGET_DEVICE=cpu)
ENGINE_VLLM = $(VLLM_PYTHON); $(call ENGINE_SIDE,vllm,PREFILL) $(call ENGINE_SIDE,vllm,DECODE) $(call ENGINE_TESTS,vllm)

# A whole run reports what it found, and the table of it is written. A choice of tests, and any other release than the
# newest, leave the table as it is.
ENGINE_REPORT = build/engine-$(1).json
ENGINE_REPORTED = $(or $(ARGS),$(if $(VERSION)$(PREFILL)$(DECODE),,--engine-report=$(abspath $(ENGINE_REPORT))))
ENGINE_TABLE = [ ! -e $(ENGINE_REPORT) ] || build/$(1)/bin/python -m tools.engine_table $(ENGINE_REPORT) adapters/$(1)/RESULTS.md

engine-sglang: ## Run SGLang, unmodified, with Statelink: real pools, real servers, every test
	@rm -f $(call ENGINE_REPORT,sglang)
	@$(ENGINE_SGLANG) $(call ENGINE_REPORTED,sglang)
	@$(call ENGINE_TABLE,sglang)

engine-sglang-smoke: ## The part of engine-sglang that takes minutes: what is installed, the pools, one pair for each backend
	@$(ENGINE_SGLANG) -m smoke $(ARGS)

try-sglang: ## Try it without a card: a tiny pair of SGLang's servers behind its router, beside one server
	@$(SGLANG_PYTHON); PYTHONPATH=adapters/sglang/tests:adapters/testing "$$python" -W ignore -m support.try_pair

engine-sglang-bench: ## Measure SGLang's own connectors and Statelink in turn, and write build/bench/sglang.json: ARGS="--help"
	@$(SGLANG_PYTHON); PYTHONPATH=adapters/sglang/tests:adapters/testing "$$python" -W ignore -m benchmarks.sglang $(ARGS)

engine-sglang-differences: ## Say how a release of SGLang differs for the adapter: ARGS=0.5.24
	@$(SGLANG_PYTHON); "$$python" -W ignore -m tools.engine_differences sglang $(ARGS)

engine-vllm: ## Run vLLM, unmodified, with Statelink: engines in processes, real servers, every test
	@rm -f $(call ENGINE_REPORT,vllm)
	@$(ENGINE_VLLM) $(call ENGINE_REPORTED,vllm)
	@$(call ENGINE_TABLE,vllm)

engine-vllm-smoke: ## The part of engine-vllm that takes minutes: what is installed, the caches, one pair for each backend
	@$(ENGINE_VLLM) -m smoke $(ARGS)

try-vllm: ## Try it without a card: a tiny pair of vLLM's servers, beside one server
	@$(VLLM_PYTHON); PYTHONPATH=adapters/vllm/tests:adapters/testing "$$python" -W ignore -m support.try_pair

engine-vllm-bench: ## Measure vLLM's own NIXL connector and Statelink in turn, and write build/bench/vllm.json: ARGS="--help"
	@$(VLLM_PYTHON); PYTHONPATH=adapters/vllm/tests:adapters/testing "$$python" -W ignore -m benchmarks.vllm $(ARGS)

engine-vllm-differences: ## Say how a release of vLLM differs for the adapter: ARGS=0.34.0
	@$(VLLM_PYTHON); "$$python" -W ignore -m tools.engine_differences vllm $(ARGS)

# The tests run in vLLM's environment, and start servers in both. SGLANG_VERSION and VLLM_VERSION name other releases.
ENGINE_CROSS = $(call ENGINE_PYTHON,sglang,STATELINK_ABSENT_PACKAGES=1,$(SGLANG_VERSION)); STATELINK_SGLANG_PYTHON=$$(realpath -s "$$python"); export STATELINK_SGLANG_PYTHON; \
  $(call ENGINE_PYTHON,vllm,VLLM_TARGET_DEVICE=cpu,$(VLLM_VERSION)); STATELINK_VLLM_PYTHON=$$(realpath -s "$$python"); \
  export STATELINK_VLLM_PYTHON; $(call ENGINE_TESTS,cross)

engine-cross: ## Run SGLang's prefill with vLLM's decode, and the other way: real servers, every test
	@$(ENGINE_CROSS) $(ARGS)

engine-cross-smoke: ## The part of engine-cross that takes minutes: tokens in both directions, and what the engines' state differs in
	@$(ENGINE_CROSS) -m smoke $(ARGS)

# The tests run in vLLM's environment, and start workers of Dynamo with both engines. Each engine has an environment for it,
# beside its own.
DYNAMO_PYTHON = python=$$(PYTHON="$(PYTHON)" tools/dynamo-env.sh $(1)); \
  $(2)=$$(realpath -s "$$python"); export $(2)
ENGINE_DYNAMO = $(SGLANG_PYTHON); $(call DYNAMO_PYTHON,sglang,STATELINK_DYNAMO_SGLANG); \
  $(VLLM_PYTHON); $(call DYNAMO_PYTHON,vllm,STATELINK_DYNAMO_VLLM); $(call ENGINE_TESTS,dynamo)

engine-dynamo: ## Run workers of NVIDIA Dynamo with SGLang and with vLLM: real fleets, workers that die, every test
	@$(ENGINE_DYNAMO) $(ARGS)

engine-dynamo-smoke: ## The part of engine-dynamo that takes minutes: the names, and tokens with both engines
	@$(ENGINE_DYNAMO) -m smoke $(ARGS)

engine-window: ## Run every release of the engines that the adapters know, and every two that may meet: ARGS="--list"
	@$(BIN)/python -m tools.engine_window $(ARGS)

fix: $(DEV) ## Format, and fix what ruff can fix
	$(BIN)/ruff check --fix-only --exit-zero
	$(BIN)/ruff format

clean: ## Remove caches and build output
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	rm -rf $(foreach folder,core plugins/* examples/demo,$(folder)/build $(folder)/dist)
	find . \( -path ./$(VENV) -o -path ./.git \) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf $(VENV)
