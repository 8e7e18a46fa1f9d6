# Every target makes what it needs. Environments: tools/venv.sh, tools/env-engine.sh.

PYTHON ?= python3
KVTIER_CACHE ?= $(HOME)/.cache/kvtier
# Where torch comes from; empty: pip's default index. For a CPU-only torch: https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Further arguments: make test PYTEST_ARGS="-k ledger", make demo DEMO_ARGS=--json, make bench BENCH_ARGS=--json
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TRITON_ARGS ?=
GPU_ARGS ?=
TORTURE_ARGS ?=
COMPARE_ARGS ?=

export PYTHON KVTIER_CACHE TORCH_INDEX
# Waiting OpenMP threads would otherwise burn the cores that kvtier's workers run on.
export OMP_WAIT_POLICY ?= passive

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint types package-check package-check-extras test-sglang test-sglang-long test-lmcache test-vllm demo-sglang triton-check test-gpu test-native test-long docs deploy-render bench compare clean

# The Python of the environment $(1), made on first use.
in = python=$$(tools/venv.sh $(1))
# The directory of the engine $(1)'s environment.
in_engine = env=$$($(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)) tools/env-engine.sh $(1) | tail -n 1)

help: ## Say what there is to make
	@sed -nE 's/^([a-z-]+): ## (.*)/  make \1\t\2/p' Makefile | expand -t 24

demo: ## Install kvtier and run its main job on a real model (under 10 minutes, no GPU)
	@$(call in,demo); "$${python%/*}/kvtier" demo $(DEMO_ARGS)

test: ## Run the tests
	@$(call in,test); "$$python" -m pytest --ignore=tests/engines $(PYTEST_ARGS)

test-native: ## Check the C++ kernels: sanitizers, every instruction set, and aarch64 where it can be emulated
	@tests/native/run.sh build/native-check

lint: ## Check style and formatting
	@$(call in,test); "$$python" -m ruff check; "$$python" -m ruff format --check

types: ## Check types
	@$(call in,test); "$$python" -m mypy; "$$python" -m mypy tests tools examples

package-check: ## Build sdist and wheel, compare them, and import from an empty environment
	@$(call in,test); "$$python" tools/package_check.py

package-check-extras: ## Install the wheel with each extra that needs torch, alone, and use it (10 minutes, some GB)
	@$(call in,test); "$$python" tools/package_extras.py

test-sglang: ## Run the tests against the real SGLang
	@$(call in_engine,sglang); "$$env/bin/python" -m pytest tests/engines/sglang $(PYTEST_ARGS)

test-sglang-long: ## Run more whole engines: several stages and ranks, both launchers with both connectors (15 minutes)
	@$(call in_engine,sglang); KVTIER_TEST_LONG=1 "$$env/bin/python" -m pytest tests/engines/sglang -k "engine_of or test_launchers" $(PYTEST_ARGS)

test-lmcache: ## Run the tests against the real LMCache
	@$(call in_engine,lmcache); "$$env/bin/python" -m pytest tests/engines/lmcache $(PYTEST_ARGS)

test-vllm: ## Run vLLM through LMCache and kvtier (not in CI: its environment takes 10 minutes and 3 GB)
	@$(call in_engine,vllm); "$$env/bin/python" -m pytest tests/engines/vllm -s $(PYTEST_ARGS)

demo-sglang: ## Run the demo's sessions through the real SGLang
	@$(call in_engine,sglang); "$$env/bin/kvtier" demo --engine sglang $(DEMO_ARGS)

test-long: ## Kill a writer 200 times, open a million pages, torture for ten minutes (half an hour in all)
	@$(call in,test); "$${python%/*}/kvtier" torture --seconds 0 --only kill --trials 100 $(TORTURE_ARGS); \
	KVTIER_REOPEN_PAGES=1000000 "$$python" -m pytest -q -s tests/benchmarks/test_nvme_reopen.py; \
	"$${python%/*}/kvtier" torture --seconds 600 $(TORTURE_ARGS)

docs: ## Build the site from README.md, docs/ and docstrings into build/site; warnings and broken links are errors
	@$(call in,docs); rm -rf build/site; \
	"$$python" -m sphinx -W --keep-going -q -E -b html -d build/site-state -c tools/docs_site . build/site; \
	echo "build/site/index.html"

deploy-render: ## Render the Helm chart's examples to deploy/k8s, and bring its copies of other files up to date
	@$(call in,test); "$$python" tools/render_k8s.py

triton-check: ## Compile every Triton kernel for every GPU generation and read what it takes (no GPU, some minutes)
	@$(call in,test); "$$python" tools/triton_resources.py $(TRITON_ARGS)

test-gpu: ## Check and time the Triton kernels on this machine's GPU ($$PYTHON: torch with CUDA, and triton)
	@tests/gpu/run.sh $(GPU_ARGS)

bench: ## Measure codecs and tiers against memcpy and fio
	@$(call in,test); "$${python%/*}/kvtier" bench codec $(BENCH_ARGS); "$${python%/*}/kvtier" bench tier $(BENCH_ARGS)

compare: ## Measure kvtier beside LMCache, SGLang's HiCache, redis-py, torchao and kvpress (20 minutes; what is measured is kept)
	@$(call in_engine,compare); "$$env/bin/python" -m tests.benchmarks.compare --report docs/results $(COMPARE_ARGS)

clean: ## Remove what was built in this clone
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@echo "dependencies stay in $(KVTIER_CACHE); remove that folder to free the space"
