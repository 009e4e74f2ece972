# The same targets at home and in CI. `make` alone lists them.

VENV ?= .venv
# Languages to leave out of stubs, checks and tests, of "typescript go".
SKIP_LANGUAGES ?=
# More words for pytest, such as PYTEST_ARGS="tests/unit -k lora".
PYTEST_ARGS ?=
# What `make gpu-bench` runs, and more words for each, such as GPU_BENCHES=decode BENCH_ARGS="--rows 64,0 64,64".
GPU_BENCHES ?= lora_kernels attention_kernels base_kernels sampling_kernels decode adapter_loads through_grpc serve \
	many_adapters first_token
BENCH_ARGS ?=

PYTHON ?= $(firstword $(foreach python,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(python) -c 'import sys; print(sys.executable if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
LANGUAGES := $(filter-out $(SKIP_LANGUAGES),typescript go)
SOURCES := clients/python/deltaplane controlplane/deltaplane_controlplane kernels/deltaplane_kernels \
	server/deltaplane_server tests bench examples deploy
INSTALLED := $(VENV)/.installed
# A GPU machine brings a Python with its own torch, which the GPU targets use as it is, from this checkout.
GPU_PYTHON ?= python3
SANITIZER ?= compute-sanitizer
# The kernels of csrc/, and the tests that launch them. cuBLAS's and torch's own are left out.
CUDA_KERNELS := regex=^(shrink|expand|few_rows|decode)_
CUDA_TESTS ?= $(addprefix tests/gpu/test_,lora.py lora_beside_products.py fused_norms.py few_rows.py attention.py)
GPU_ENV = PYTHONPATH=$(CURDIR)/clients/python:$(CURDIR)/controlplane:$(CURDIR)/kernels:$(CURDIR)/server:$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH}
# Debian's Go libraries are a GOPATH, without modules; a link puts this tree on one too.
GOPATH_LINK := build/gopath/src/github.com/deltaplane/deltaplane
GO = cd $(GOPATH_LINK)/clients/go && GO111MODULE=off GOPATH=$(CURDIR)/build/gopath:/usr/share/gocode go

export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export SKIP_LANGUAGES

.DELETE_ON_ERROR:
.PHONY: help install demo test soak check stubs bench gpu-test gpu-sanitize gpu-bench gpu-ready clean
.PHONY: check-style check-types check-imports check-protos check-stubs check-typescript check-go
.PHONY: tools-typescript tools-go examples-typescript examples-go

help:
	@echo "make install   make $(VENV), with the server, its tests and the demo in it"
	@echo "make demo      stream from two adapters and their base, side by side"
	@echo "make test      run all tests"
	@echo "make soak      run the tests of random changes, random adapters and kill -9 for longer than in make test"
	@echo "make check     style, types, imports, protos, freshness of the stubs"
	@echo "make stubs     write the client stubs from the protos"
	@echo "make bench     measure the server on this machine's CPU"
	@echo "make gpu-test  run the tests that need an NVIDIA GPU, with the Python and the torch that are there"
	@echo "make gpu-sanitize run the tests of the CUDA kernels under NVIDIA's compute-sanitizer"
	@echo "make gpu-bench measure kernels, engine and server on the GPU; BENCH_ARGS=--quick for less of each"
	@echo "make clean     remove all that these targets made"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml deploy/install.py deploy/install_torch.py
	@test -n "$(PYTHON)" || { echo "make: deltaplane needs Python 3.11 or newer; install it, or name it with PYTHON=" >&2; exit 1; }
	@$(PYTHON) deploy/install.py $(VENV) server,demo,dev
	@touch $@

demo: install
	@python -m examples.demo

test: install $(LANGUAGES:%=examples-%)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python -m pytest $(PYTEST_ARGS)

# Eight threads change the same adapters for half a minute; 200 processes are killed in the middle of a change;
# 500 batches of random adapters are compared with PEFT.
soak: export DELTAPLANE_SOAK_SECONDS ?= 30
soak: export DELTAPLANE_SOAK_KILLS ?= 200
soak: export DELTAPLANE_FIDELITY_EXAMPLES ?= 500
soak: install
	OMP_NUM_THREADS=1 python -m pytest tests/unit/test_manager_soak.py tests/unit/test_manager_kills.py \
		tests/unit/test_peft_tokens.py $(PYTEST_ARGS)

check: check-style check-types check-imports check-protos check-stubs $(LANGUAGES:%=check-%)

check-style: install
	ruff check .
	ruff format --check .

check-types: install
	mypy $(SOURCES)

check-imports: install
	lint-imports

check-protos: install
	buf lint protos
	protos/check_breaking.sh

check-stubs: install $(LANGUAGES:%=tools-%)
	protos/check_stubs.sh python $(LANGUAGES)

stubs: install $(LANGUAGES:%=tools-%)
	protos/generate.sh clients python $(LANGUAGES)

bench: install
	python -m bench.cpu
	python -m bench.front_door
	python -m bench.catalogue

# Warnings of versions that other machines bring are shown, and no errors.
gpu-test: gpu-ready
	$(GPU_ENV) $(GPU_PYTHON) -m pytest tests/gpu -W default $(PYTEST_ARGS)

# memcheck sees the end of a tensor where each has memory of its own, with which nothing can be captured; so the tests
# of graphs run a second time as they are. Errors of calls are the driver's answers to what libraries look for. cuBLAS's
# kernels do not run under racecheck, and so not the tests that launch them too.
gpu-sanitize: SANITIZE = $(GPU_ENV) $(SANITIZER) --report-api-errors no --error-exitcode 1 \
	--kernel-name '$(CUDA_KERNELS)' --tool
gpu-sanitize: gpu-ready
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) memcheck $(GPU_PYTHON) -m pytest -k "not graph" -W default $(CUDA_TESTS)
	$(SANITIZE) memcheck $(GPU_PYTHON) -m pytest -k graph -W default $(CUDA_TESTS)
	$(SANITIZE) racecheck $(GPU_PYTHON) -m pytest -k "not linears_take and not beside_products" -W default $(CUDA_TESTS)

gpu-bench: gpu-ready
	@set -e; for bench in $(GPU_BENCHES); do \
		echo "bench.$$bench"; $(GPU_ENV) $(GPU_PYTHON) -m bench.$$bench $(BENCH_ARGS); \
	done

gpu-ready:
	@$(GPU_PYTHON) deploy/check_gpu.py

tools-typescript: clients/typescript/node_modules/.package-lock.json

clients/typescript/node_modules/.package-lock.json: clients/typescript/package-lock.json
	clients/install_tools.sh typescript
	cd clients/typescript && npm ci
	@touch $@

tools-go:
	@clients/install_tools.sh go

examples-typescript: tools-typescript
	cd clients/typescript && npm run --silent build

check-typescript: tools-typescript
	cd clients/typescript && npx tsc --noEmit

examples-go: tools-go $(GOPATH_LINK)
	$(GO) build -o $(CURDIR)/build/go/two_adapters ./examples/two_adapters

check-go: tools-go $(GOPATH_LINK)
	@files=$$(gofmt -l clients/go) && test -z "$$files" || { echo "make: run gofmt -w on" $$files >&2; exit 1; }
	$(GO) vet ./...

$(GOPATH_LINK):
	@mkdir -p $(@D) && ln -sfn $(CURDIR) $@

clean:
	rm -rf $(VENV) build dist clients/typescript/node_modules clients/typescript/dist
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
