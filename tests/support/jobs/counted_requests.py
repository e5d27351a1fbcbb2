"""A job on the embedded digits; the chief prints the number of requests that it sends per step."""

from __future__ import annotations

from typing import Any

from mpitrain import Hook, Job, data, nn, optim
from mpitrain.comm.rpc.messages import MessageClient
from mpitrain.comm.rpc.windows import WindowClient

requests = 0


def _count(client: type[Any]) -> None:
    send_request = client.send_request

    def counting(*arguments: Any, **options: Any) -> None:
        global requests
        requests += 1
        send_request(*arguments, **options)

    client.send_request = counting


_count(WindowClient)
_count(MessageClient)


class Count(Hook):
    def begin(self, loop: Any) -> None:
        self.before: tuple[int, int] | None = None

    def after_step(self, loop: Any) -> None:
        if self.before is None:
            self.before = loop.step, requests
        self.after = loop.step, requests

    def end(self, loop: Any) -> None:
        (first, before), (last, after) = self.before, self.after
        if loop.cluster.chief:
            print(f"{(after - before) / (last - first):.2f} requests per step")


def job() -> Job:
    digits = data.mnist(None)
    return Job(
        model=nn.Dense(digits.features, 10),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.sgd(0.1),
        train=digits.train,
        batch_size=10,
        train_steps=50,
        hooks=[Count()],
    )
