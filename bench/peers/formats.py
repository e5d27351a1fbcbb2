"""Writes and reads files with webdataset and TensorFlow, for ``bench/formats.py``.

A request and its answer are pickled: requests come on standard input, answers go to standard output.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")


@functools.cache
def tensorflow() -> Any:
    import tensorflow

    return tensorflow


def write_tar(path: str, samples: list[dict[str, Any]]) -> None:
    """Write samples with webdataset's own encoders."""
    from webdataset import TarWriter

    with TarWriter(path) as writer:
        for sample in samples:
            writer.write(sample)


def read_tar(path: str) -> list[dict[str, Any]]:
    """Return samples as webdataset groups them, in bytes."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    with open(path, "rb") as stream:
        samples = list(group_by_keys(tar_file_expander([{"url": path, "stream": stream}])))
    return [
        {key: item for key, item in sample.items() if key not in ("__url__", "__local_path__")} for sample in samples
    ]


def _feature(value: list[Any]) -> Any:
    train = tensorflow().train
    if not value:
        return train.Feature()
    if isinstance(value[0], bytes):
        return train.Feature(bytes_list=train.BytesList(value=value))
    if isinstance(value[0], float):
        return train.Feature(float_list=train.FloatList(value=value))
    return train.Feature(int64_list=train.Int64List(value=value))


def write_tfrecord(path: str, examples: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Write messages: features, and the features of sequences if there are any."""
    train = tensorflow().train
    with tensorflow().io.TFRecordWriter(path) as writer:
        for features, sequences in examples:
            context = train.Features(feature={name: _feature(value) for name, value in features.items()})
            if sequences:
                lists = {
                    name: train.FeatureList(feature=[_feature(value) for value in steps])
                    for name, steps in sequences.items()
                }
                message = train.SequenceExample(context=context, feature_lists=train.FeatureLists(feature_list=lists))
            else:
                message = train.Example(features=context)
            writer.write(message.SerializeToString())


def _values(feature: Any) -> tuple[str, list[Any]]:
    kind = feature.WhichOneof("kind") or ""
    return kind, list(getattr(feature, kind).value) if kind else []


def read_tfrecord(path: str, is_sequence: list[bool]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return kind and values of each feature, as TensorFlow reads them."""
    train, examples = tensorflow().train, []
    for record, sequence in zip(tensorflow().data.TFRecordDataset(path).as_numpy_iterator(), is_sequence, strict=True):
        if sequence:
            message = train.SequenceExample.FromString(record)
            features, lists = message.context.feature, message.feature_lists.feature_list
        else:
            features, lists = train.Example.FromString(record).features.feature, {}
        steps = {name: [_values(step) for step in lists[name].feature] for name in lists}
        examples.append(({name: _values(features[name]) for name in features}, steps))
    return examples


def main() -> None:
    requests = {each.__name__: each for each in (write_tar, read_tar, write_tfrecord, read_tfrecord)}
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what packages print must not mix with the answers
    while True:
        try:
            what, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = requests[what](*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
