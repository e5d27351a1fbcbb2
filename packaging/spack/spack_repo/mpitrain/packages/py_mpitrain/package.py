"""A recipe for Spack 1.0 and newer.

spack repo add packaging/spack/spack_repo/mpitrain
spack env activate --create mpitrain
spack develop --path "$PWD" py-mpitrain@=0.1.0
spack add py-mpitrain
spack install
"""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpitrain(PythonPackage):
    """Train a model on many MPI ranks: the same job file on a workstation, a cluster, and in batch scripts."""

    # For a release: homepage, and pypi = "mpitrain/mpitrain-0.1.0.tar.gz" with the sha256 of the version.
    license("MIT", checked_by="the mpitrain authors")

    version("0.1.0")

    variant("torch", default=False, description="Train PyTorch modules")
    variant("report", default=False, description="Web pages and images about runs")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-click@8.1:")
        depends_on("py-cloudpickle@3.0:")
        depends_on("py-docstring-parser@0.15:")
        depends_on("py-h5py@3.8:")
        depends_on("py-jinja2@3.0:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-numba@0.59:")
        depends_on("py-numpy@1.26:")
        depends_on("py-rich@13.0:")
        depends_on("py-threadpoolctl@3.1:")
        depends_on("py-tomli@2.0:", when="^python@:3.10")
        depends_on("py-tomli-w@1.0:")
        depends_on("py-xxhash@3.3:")

        depends_on("py-torch@2.6:", when="+torch")
        depends_on("py-safetensors@0.4:", when="+torch")
        depends_on("py-matplotlib@3.8:", when="+report")
        depends_on("py-plotly@6:", when="+report")

    import_modules = ["mpitrain"]
