"""The peer of ``bench/allreduce.py``: MPI_Allreduce of this environment's MPI library.

    mpirun -n 2 python bench/peers/allreduce.py REPEATS KIB ...

Prints a JSON object: median seconds for each size in KiB.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
result = {}
for kib in map(int, sys.argv[2:]):
    vector = np.ones(kib * 256, np.float32)
    times = []
    for _ in range(max(5, min(int(sys.argv[1]), 2_000_000 // kib))):
        comm.Barrier()
        began = time.perf_counter()
        comm.Allreduce(MPI.IN_PLACE, vector)
        times.append(time.perf_counter() - began)
        vector.fill(1)
    result[kib] = statistics.median(times)
if comm.rank == 0:
    print(json.dumps(result))
