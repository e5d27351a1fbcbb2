"""A probe with round numbers."""

from __future__ import annotations

from mpitrain.predict.measurements import (
    VERSION,
    CodecTimes,
    ComputeTimes,
    ExchangeTimes,
    JobFacts,
    LinkTimes,
    Noise,
    Probe,
    RankFacts,
    ServerTimes,
)

COMPUTE_S, UPDATE_S, LOOP_S = 0.011, 0.002, 0.001  # seconds, for a batch of 100 examples
ELEMENTS = 1 << 20

PROBE = Probe(
    version=VERSION,
    job=JobFacts("made", 100, 60_000, ELEMENTS, 4, 3, (0, ELEMENTS // 2), (1.0, 0.5), True, False),
    ranks=RankFacts((1, 1), 4, 0.0),
    compute=ComputeTimes(
        (50, 100, 200),
        (0.0005, 0.001, 0.002),
        (0.002, 0.004, 0.008),
        (0.003, 0.006, 0.012),
        1.0,
        (1, 2, 4),
        (UPDATE_S, 0.0025, 0.0035),
        0.0005,
        0.0,
        LOOP_S,
    ),
    server=ServerTimes(0.002, 0.0005),
    codecs={"int8": CodecTimes(0.25, 0.001, 0.0005), "powersgd:4": CodecTimes(0.01, 0.002, 0.001)},
    within=None,
    between=LinkTimes(10e-6, 2e-6, 1e9, 1e9, 0.0, 0.25e-9),
    exchanges=ExchangeTimes(1e-9, 0.004, 100e-6, 1e-9, 1e-9),
    step_factors=(0.9, 1.0, 1.0, 1.1),
    noise=Noise(1000.0, 100),
)
