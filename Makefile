# Entry points for developers and CI. The work is done by cargo and scripts/.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup browser test-mpi test-packages test-dist-often torture cuda-tools cuda-setup demo examples test lint fuzz gpu-test gpu-package gpu-train-package wheel wheel-test torch-test book book-pictures

# The ptxas that tests use: TILEWRIGHT_PTXAS if set, else the one that `make cuda-tools` downloads.
PTXAS := $(or $(TILEWRIGHT_PTXAS),$(CURDIR)/build/cuda-tools/nvidia/cu13/bin/ptxas)

# The published crates as docs.rs builds them, without LLVM; with the CUDA version that is not the default.
WITHOUT_LLVM := -p tilewright -p tilewright-codegen -p tilewright-runtime -p tilewright-kernels -p tilewright-cli --no-default-features --features tilewright/cuda-12

help:
	@echo 'make demo      run kernels on the GPU if there is one, else on the CPU'
	@echo 'make examples  run all programs in examples/, on the GPU if there is one, else on the CPU'
	@echo 'make test      run all tests; tests that need a GPU are reported as skipped if there is none'
	@echo 'make test-mpi  run the multi-rank tests over MPI'
	@echo 'make test-packages  build and run programs that use the published crates, from their packages, with LLVM and without'
	@echo 'make test-dist-often  run all multi-rank tests 20 times: ranks as threads, as processes and over MPI'
	@echo 'make torture   inject a fault at a random moment into each of 200 training runs, and compare results with undisturbed runs'
	@echo 'make wheel     build build/wheel: the Python package (docs/python.md)'
	@echo 'make wheel-test  build the Python package without optimization, and run its tests with NumPy on the CPU'
	@echo 'make torch-test  the same with PyTorch, which pip downloads (several GB), and the tests of tilewright.torch'
	@echo 'make lint      check formatting, lints and documentation'
	@echo 'make fuzz      fuzz the parser and the compiler for a minute each (needs nightly Rust and cargo-fuzz)'
	@echo 'make gpu-test  build build/gpu-test.xz: the GPU tests as one file, to copy to a GPU machine'
	@echo 'make gpu-package  build build/gpu: GPU tests and benchmarks, to copy to a GPU machine (docs/gpu-testing.md)'
	@echo 'make gpu-train-package  build build/gpu-train: tilewright with GPU training, to copy to a GPU machine (docs/gpu-testing.md)'
	@echo 'make cuda-setup  download what --features tilewright-harness/cuda needs, if no CUDA toolkit is installed'
	@echo 'make book      build the book of docs/ into build/book, with mdbook from PATH or from crates.io'
	@echo 'make book-pictures  update the pictures of the book after a change of the compiler'
	@echo 'make browser   install Chromium, in which a test opens the page of explain'
	@echo 'make setup     install build dependencies (most other targets do this first)'

setup:
	@scripts/setup.sh

cuda-tools:
	@scripts/cuda-tools.sh

browser:
	@scripts/browser.sh

cuda-setup:
	@scripts/cuda-setup.sh

demo: setup
	cargo run --release --bin tilewright -- demo --out build/demo

# TILEWRIGHT_DEVICE=cpu forces the CPU.
examples: setup
	cargo build -p tilewright --examples
	@set -e; for file in examples/*.rs; do cargo run --quiet -p tilewright --example "$$(basename "$$file" .rs)"; done

# One test more at a time than there are CPUs: ranks and processes wait for each other.
test: export RUST_TEST_THREADS ?= $(shell echo $$(($$(nproc) + 1)))
test: setup cuda-tools browser
	@if [ -x "$(PTXAS)" ]; then export TILEWRIGHT_PTXAS="$(PTXAS)"; fi; \
	set -x; cargo test --workspace

# Installs Open MPI and libclang if they are missing. With the features of the workspace, so that `make test` has built
# most of it.
test-mpi: setup
	@scripts/mpi-setup.sh
	cargo test --workspace --features tilewright-harness/mpi --test dist -- mpi

test-packages: setup
	scripts/package-test.sh

# TIMES sets the number of repetitions (20 by default).
test-dist-often: setup
	@scripts/mpi-setup.sh
	cargo test -p tilewright-harness --features mpi --test dist --no-run
	scripts/repeat.sh $(or $(TIMES),20) cargo test -p tilewright-harness --features mpi --test dist

# SEED=2 draws other runs; FIRST=35 RUNS=1 reproduces run 35 alone.
torture: setup
	cargo test -p tilewright-harness --test torture -- --seed $(or $(SEED),1) --first $(or $(FIRST),0) --runs $(or $(RUNS),200)

wheel: setup
	scripts/wheel.sh build

# WHEEL names an existing wheel to test.
wheel-test: setup
	$(if $(WHEEL),,scripts/wheel.sh build dev)
	scripts/wheel.sh test $(or $(WHEEL),build/wheel-dev/*.whl)

torch-test: setup
	$(if $(WHEEL),,scripts/wheel.sh build dev)
	scripts/wheel.sh torch $(or $(WHEEL),build/wheel-dev/*.whl)

# Installs mdbook into build/mdbook if it is not on PATH.
book:
	@scripts/book.sh

book-pictures: setup
	BLESS=1 cargo test -p tilewright-harness --test book pictures

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
	cargo clippy $(WITHOUT_LLVM) --lib -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc $(WITHOUT_LLVM) --no-deps

# FUZZ_SECONDS sets the time per fuzz target (60 by default).
fuzz: setup
	cd codegen && cargo +nightly fuzz run parse -- -max_total_time=$(or $(FUZZ_SECONDS),60)
	cd codegen && cargo +nightly fuzz run programs -- -max_total_time=$(or $(FUZZ_SECONDS),60)

gpu-test: setup
	@scripts/gpu-test.sh

gpu-package: setup
	@scripts/gpu-package.sh

gpu-train-package: setup
	@scripts/gpu-train.sh
