"""Launches a run that takes long, and waits for it."""

import sys

import mpitrain

if __name__ == "__main__":
    job_file, run_dir, steps = sys.argv[1:]
    mpitrain.launch(job_file, ranks=2, run_dir=run_dir, pause=0.02, train_steps=int(steps), log_steps=1).wait()
