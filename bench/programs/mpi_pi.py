"""An MPI program with mpi4py: integrates 4 / (1 + x^2) from 0 to 1.

mpirun -n 2 python mpi_pi.py ROUNDS
mpitrain run -n 2 mpi_pi.py ROUNDS
"""

import sys

from mpi4py import MPI

INTERVALS = 20_000


def main() -> None:
    comm = MPI.COMM_WORLD
    for number in range(int(sys.argv[1])):
        points = range(comm.rank, INTERVALS, comm.size)
        part = sum(4.0 / (1.0 + ((point + 0.5) / INTERVALS) ** 2) for point in points) / INTERVALS
        total = comm.allreduce(part)
        if comm.rank == 0 and number % 100 == 0:
            print(f"round {number}: {total!r}", flush=True)
    if comm.rank == 0:
        with open("result.txt", "w") as file:
            file.write(f"{total!r}\n")


if __name__ == "__main__":
    main()
