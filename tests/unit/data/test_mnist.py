"""MNIST: reading returns the written values, and errors name a damaged file."""

import gzip
import struct

import numpy as np
import pytest

from mpitrain import data
from mpitrain.data import idx

from ...support.splits import message, read

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def make_arrays(counts=(7, 3)):
    rng = np.random.default_rng(0)
    arrays = []
    for count in counts:
        arrays.append(rng.integers(0, 256, (count, 5, 4), np.uint8))
        arrays.append(rng.integers(0, 10, count).astype(np.uint8))
    return arrays


def write(folder, arrays, suffix=""):
    for name, array in zip(NAMES, arrays, strict=True):
        raw = idx_bytes(array)
        (folder / (name + suffix)).write_bytes(gzip.compress(raw) if suffix else raw)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_reads_what_was_written(tmp_path, suffix):
    arrays = make_arrays()
    write(tmp_path, arrays, suffix)
    images = data.mnist(tmp_path)
    assert (images.features, images.image_shape, images.classes) == (20, (5, 4, 1), 10)
    for split, pixels, labels in ((images.train, *arrays[:2]), (images.validation, *arrays[2:])):
        assert (len(split), split.shape, split.dtype, split.scale) == (len(labels), (20,), np.uint8, 1 / 255)
        assert split.nbytes == 21 * len(labels)
        for start, stop in ((0, len(labels)), (1, 3), (2, 2)):
            found = read(split, start, stop)
            assert np.array_equal(found[0], pixels.reshape(-1, 20)[start:stop])
            assert np.array_equal(found[1], labels[start:stop])


def test_mnist_takes_a_mixture_of_plain_and_gzipped_files(tmp_path):
    arrays = make_arrays()
    write(tmp_path, arrays)
    (tmp_path / NAMES[0]).unlink()
    (tmp_path / f"{NAMES[0]}.gz").write_bytes(gzip.compress(idx_bytes(arrays[0])))
    assert np.array_equal(read(data.mnist(tmp_path).train)[0], arrays[0].reshape(7, 20))


def test_the_embedded_digits_are_whole():
    images = data.mnist()
    assert (len(images.train), len(images.validation)) == (1437, 360)
    assert (images.features, images.image_shape) == (64, (8, 8, 1))
    for split in (images.train, images.validation):
        examples, labels = read(split)
        data.check_labels(split, labels)
        assert examples.max() == 16 and split.scale == 1 / 16
        assert np.bincount(labels).min() > len(split) // 20
        assert set(labels) == set(range(10))


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_file_is_named_and_so_are_all_four(tmp_path, missing):
    write(tmp_path, make_arrays())
    (tmp_path / NAMES[missing]).unlink()
    text = message(lambda: data.mnist(tmp_path))
    assert text.count(NAMES[missing]) == 2 and str(tmp_path) in text and ".gz" in text
    assert all(name in text for name in NAMES)


def test_a_missing_folder_is_named(tmp_path):
    assert str(tmp_path / "nowhere") in message(lambda: data.mnist(tmp_path / "nowhere"))
    assert str(tmp_path) in message(lambda: data.mnist(tmp_path))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("which", range(4))
def test_every_truncation_is_found_and_named(tmp_path, suffix, which):
    write(tmp_path, make_arrays(), suffix)
    path = tmp_path / (NAMES[which] + suffix)
    whole = path.read_bytes()
    for length in range(0, len(whole), 1 if suffix else 5):
        path.write_bytes(whole[:length])

        def load():
            images = data.mnist(tmp_path)
            read(images.train)
            read(images.validation)

        text = message(load)
        assert str(path) in text and "truncated" in text


def test_a_flipped_bit_in_a_gzipped_file_is_found(tmp_path):
    write(tmp_path, make_arrays(), ".gz")
    path = tmp_path / f"{NAMES[0]}.gz"
    raw = bytearray(path.read_bytes())
    raw[-8] ^= 1  # of the checksum
    path.write_bytes(raw)
    split = data.mnist(tmp_path).train
    assert str(path) in message(lambda: read(split))


def test_a_file_that_continues_after_its_end_is_named(tmp_path):
    write(tmp_path, make_arrays())
    path = tmp_path / NAMES[1]
    path.write_bytes(path.read_bytes() + b"\0")
    split = data.mnist(tmp_path).train
    text = message(lambda: read(split))
    assert str(path) in text and "longer" in text


@pytest.mark.parametrize(
    ("which", "raw", "expected"),
    [
        (0, b"\x89PNG\r\n\x1a\n" + bytes(50), "89504e47"),
        (0, struct.pack(">HBB3I", 0, 13, 3, 7, 5, 4) + bytes(560), "00000d03"),
        (1, b"", "0 bytes"),
        (1, struct.pack(">HBBI", 0, 8, 1, 0), "(0,)"),
        (2, struct.pack(">HBB4I", 0, 8, 4, 3, 5, 4, 1) + bytes(60), "4-dimensional"),
        (3, struct.pack(">HBBI", 0, 8, 1, 4) + bytes(4), "3 images"),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path, which, raw, expected):
    write(tmp_path, make_arrays())
    path = tmp_path / NAMES[which]
    path.write_bytes(raw)
    text = message(lambda: data.mnist(tmp_path))
    assert str(path) in text and expected in text


def test_a_gz_file_that_is_not_gzipped_is_named(tmp_path):
    write(tmp_path, make_arrays(), ".gz")
    path = tmp_path / f"{NAMES[2]}.gz"
    path.write_bytes(b"<html>404</html>")
    assert str(path) in message(lambda: data.mnist(tmp_path))


def test_labels_where_images_are_expected_are_named(tmp_path):
    arrays = make_arrays()
    write(tmp_path, [arrays[1], arrays[0], *arrays[2:]])
    text = message(lambda: data.mnist(tmp_path))
    assert str(tmp_path / NAMES[0]) in text and "labels" in text.replace(str(tmp_path), "")
    write(tmp_path, [arrays[0], arrays[0], *arrays[2:]])
    text = message(lambda: data.mnist(tmp_path))
    assert str(tmp_path / NAMES[1]) in text and "images" in text.replace(str(tmp_path), "")


def test_training_and_validation_images_must_be_alike(tmp_path):
    arrays = make_arrays()
    write(tmp_path, [*arrays[:2], np.zeros((3, 6, 4), np.uint8), arrays[3]])
    text = message(lambda: data.mnist(tmp_path))
    assert "(5, 4, 1)" in text and "(6, 4, 1)" in text


def test_a_label_above_nine_is_named_with_its_file(tmp_path):
    arrays = make_arrays()
    arrays[1][4] = 10
    write(tmp_path, arrays)
    split = data.mnist(tmp_path).train
    _, labels = read(split)
    text = message(lambda: data.check_labels(split, labels))
    assert str(tmp_path / NAMES[1]) in text and "label 10 of example 4" in text


def test_a_header_is_read_without_the_rest(tmp_path):
    path = tmp_path / f"{NAMES[0]}.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (500, 9, 9), np.uint8)))[:2000])
    assert idx.read_header(path, 3) == (500, 9, 9)


def test_a_digest_of_transformed_images_reads_only_the_first_ones(tmp_path):
    arrays = make_arrays((40, 3))
    write(tmp_path, arrays)
    train = data.mnist(tmp_path).train.map(lambda example: example)
    digest = train.sample_digest()
    path = tmp_path / NAMES[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert data.mnist(tmp_path).train.map(lambda example: example).sample_digest() == digest
    arrays[0][15] += 1
    write(tmp_path, arrays)
    assert data.mnist(tmp_path).train.map(lambda example: example).sample_digest() != digest
