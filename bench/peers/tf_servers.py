"""The peer of ``bench/async.py``: training with TensorFlow's parameter servers as in its tutorials, 1 ps and 2 workers.

    python bench/peers/tf_servers.py {async,sync} STEPS DATA_DIR

Starts three tasks on this machine (tf.train.Server over gRPC, replica_device_setter, Adam, MonitoredTrainingSession;
``sync`` adds SyncReplicasOptimizer) and prints a JSON list: global steps/s of all intervals except the first. Batches
come from an array in memory. When the chief has its results, the other tasks, which would wait for it forever, are
killed.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

BATCH, HIDDEN, WORKERS, INTERVALS = 100, 100, 2, 8


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start_all(mode: str, steps: str, folder: str) -> None:
    ports = ",".join(map(str, free_ports(1 + WORKERS)))
    words = [sys.executable, __file__, mode, steps, folder]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PEER_PORTS": ports}
    tasks = [("ps", 0), *(("worker", index) for index in range(WORKERS))]
    processes = [
        subprocess.Popen(
            words, env={**environment, "PEER_TASK": f"{job}:{index}"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for job, index in tasks
    ]
    try:
        out, _ = processes[1].communicate(timeout=300)
        sys.stdout.write(out.decode())
    finally:
        for process in processes:
            process.kill()


def read_idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def run_task(mode: str, steps: int, folder: Path, job: str, index: int, ports: list[str]) -> None:
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    hosts = [f"127.0.0.1:{port}" for port in ports]
    cluster = tf.train.ClusterSpec({"ps": hosts[:1], "worker": hosts[1:]})
    server = tf.train.Server(cluster, job_name=job, task_index=index)
    if job == "ps":
        server.join()
    images = read_idx(folder / "train-images-idx3-ubyte.gz", 16).reshape(-1, 784).astype(np.float32) / 255
    labels = read_idx(folder / "train-labels-idx1-ubyte.gz", 8).astype(np.int64)
    with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{index}", cluster=cluster)):
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int64, [None])
        global_step = tf.train.get_or_create_global_step()
        w1 = tf.get_variable("w1", [784, HIDDEN], initializer=tf.glorot_uniform_initializer())
        b1 = tf.get_variable("b1", [HIDDEN], initializer=tf.zeros_initializer())
        w2 = tf.get_variable("w2", [HIDDEN, 10], initializer=tf.glorot_uniform_initializer())
        b2 = tf.get_variable("b2", [10], initializer=tf.zeros_initializer())
        logits = tf.nn.relu(x @ w1 + b1) @ w2 + b2
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        optimizer = tf.train.AdamOptimizer(1e-3)
        hooks = []
        if mode == "sync":
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, WORKERS, WORKERS)
            hooks.append(optimizer.make_session_run_hook(index == 0))
        train = optimizer.minimize(loss, global_step=global_step)
    rng = np.random.default_rng(index)
    rates: list[float] = []
    every = steps // INTERVALS
    with tf.train.MonitoredTrainingSession(
        master=server.target,
        is_chief=index == 0,
        hooks=hooks,
        save_checkpoint_secs=None,
        save_summaries_steps=None,
        log_step_count_steps=None,
    ) as session:
        last_step, began = 0, time.perf_counter()
        while not session.should_stop():
            batch = rng.integers(0, len(images), BATCH)
            step = session.run([train, global_step], {x: images[batch], y: labels[batch]})[1]
            if step - last_step >= every:
                now = time.perf_counter()
                rates.append(float((step - last_step) / (now - began)))
                last_step, began = int(step), now
            if step >= steps and index == 0:
                print(json.dumps(rates[1:]), flush=True)
                os._exit(0)  # closing the session would wait for the other worker


if __name__ == "__main__":
    if "PEER_TASK" in os.environ:
        job, index = os.environ["PEER_TASK"].split(":")
        run_task(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), job, int(index), os.environ["PEER_PORTS"].split(","))
    else:
        start_all(*sys.argv[1:4])
