# The commands that people and CI use. Each does one thing that can be read here; the work is in cargo and scripts/.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup test-mpi test-dist-often torture cuda-tools cuda-setup demo examples test lint fuzz gpu-test gpu-package gpu-train-package

# The ptxas that tests assemble PTX with: yours, or the one that `make cuda-tools` fetches.
PTXAS := $(or $(TILEWRIGHT_PTXAS),$(CURDIR)/build/cuda-tools/nvidia/cu13/bin/ptxas)

help:
	@echo 'make demo      run kernels on the GPU if there is one, else on the CPU'
	@echo 'make examples  run every file of examples/, on the GPU if there is one, else on the CPU'
	@echo 'make test      run all tests; what needs a GPU says that it was skipped'
	@echo 'make test-mpi  run the tests of ranks over MPI'
	@echo 'make test-dist-often  run all tests of ranks, as threads, processes and over MPI, 20 times'
	@echo 'make torture   hit 200 trainings by faults at random moments, and compare what becomes of them'
	@echo 'make lint      check formatting, lints and documentation'
	@echo 'make fuzz      fuzz the parser and the compiler for a minute each (needs nightly Rust and cargo-fuzz)'
	@echo 'make gpu-test  build build/gpu-test.xz, the GPU tests as one file to carry to a GPU machine'
	@echo 'make gpu-package  build build/gpu, the GPU tests and benchmarks to carry to a GPU machine (docs/gpu-testing.md)'
	@echo 'make gpu-train-package  build build/gpu-train, the program with models on GPUs to carry to a GPU machine (docs/gpu-testing.md)'
	@echo 'make cuda-setup  fetch what a build with --features tilewright-harness/cuda needs where no CUDA toolkit is installed'
	@echo 'make setup     install what a build needs (demo and test do this first)'

setup:
	@scripts/setup.sh

cuda-tools:
	@scripts/cuda-tools.sh

cuda-setup:
	@scripts/cuda-setup.sh

demo: setup
	cargo run --release --bin tilewright -- demo --out build/demo

# TILEWRIGHT_DEVICE=cpu keeps them off the GPU.
examples: setup
	cargo build -p tilewright --examples
	@set -e; for file in examples/*.rs; do cargo run --quiet -p tilewright --example "$$(basename "$$file" .rs)"; done

test: setup cuda-tools
	@if [ -x "$(PTXAS)" ]; then export TILEWRIGHT_PTXAS="$(PTXAS)"; fi; \
	set -x; cargo test --workspace

# Ranks over MPI: wants Open MPI and libclang, which it installs.
test-mpi: setup
	@scripts/mpi-setup.sh
	cargo test -p tilewright-harness --features mpi --test dist -- mpi

# TIMES=5 runs them less often.
test-dist-often: setup
	@scripts/mpi-setup.sh
	cargo test -p tilewright-harness --features mpi --test dist --no-run
	scripts/repeat.sh $(or $(TIMES),20) cargo test -p tilewright-harness --features mpi --test dist

# SEED=2 draws others; FIRST=35 RUNS=1 makes one of them again.
torture: setup
	cargo test -p tilewright-harness --test torture -- --seed $(or $(SEED),1) --first $(or $(FIRST),0) --runs $(or $(RUNS),200)

lint: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# FUZZ_SECONDS=3600 fuzzes longer.
fuzz: setup
	cd codegen && cargo +nightly fuzz run parse -- -max_total_time=$(or $(FUZZ_SECONDS),60)
	cd codegen && cargo +nightly fuzz run programs -- -max_total_time=$(or $(FUZZ_SECONDS),60)

gpu-test: setup
	@scripts/gpu-test.sh

gpu-package: setup
	@scripts/gpu-package.sh

gpu-train-package: setup
	@scripts/gpu-train.sh
