# Source this file in the repository's root on a compute node: . bench/gpu_checks/env.sh WHEELS SITE
# Installs the wheels in the folder WHEELS to the folder SITE, unless SITE exists, and sets the paths of programs and
# CUDA libraries.
if [ ! -d "$2" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --prefix "$2" "$1"/*.whl || return
fi
export PATH="$2/bin:$PATH"
export PYTHONPATH="$PWD:$(echo "$2"/lib/python3*/site-packages)${PYTHONPATH:+:$PYTHONPATH}"
_nvidia="$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia"
export LD_LIBRARY_PATH="$2/lib:$_nvidia/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
