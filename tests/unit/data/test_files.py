"""Data in files: what is read is what was written, and a damaged file is named."""

import errno
import gzip
import multiprocessing
import re
import struct
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import data
from mpitrain.data import idx
from mpitrain.data.files import UnchangedFile
from mpitrain.errors import DataError

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


def read(split, start=0, stop=None):
    stop = len(split) if stop is None else stop
    examples = np.empty((stop - start, *split.shape), split.dtype)
    labels = np.empty((stop - start, *split.label_shape), split.label_dtype)
    split.read(start, stop, examples, labels)
    return examples, labels


def message(act):
    with pytest.raises(DataError) as caught:
        act()
    text = str(caught.value)
    assert "\n" not in text
    return text


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


def index_at_the_same_time(path, calls, started, together, fails):
    def make(_):
        is_first = not calls.exists()
        with open(calls, "a") as file:
            file.write("x")
        if is_first:
            time.sleep(0.5)
        elif fails:  # those that have waited do not fail one after another
            together.wait(20)
        if fails:
            raise DataError("damaged")
        return np.arange(3)

    started.wait(20)
    try:
        result = UnchangedFile(path).index("kind", make).tolist()
    except DataError:
        result = None
    assert result == (None if fails else [0, 1, 2])


@pytest.mark.parametrize("fails", [False, True])
def test_one_process_makes_an_index(tmp_path, monkeypatch, fails):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, calls = tmp_path / "a", tmp_path / "calls"
    path.write_bytes(b"content")
    context = multiprocessing.get_context("fork")
    arguments = path, calls, context.Barrier(4), context.Barrier(3), fails
    processes = [context.Process(target=index_at_the_same_time, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(calls.read_text()) == (4 if fails else 1)


def test_arrays_are_a_split():
    examples, labels = np.arange(12.0).reshape(4, 3), np.array([[0], [1], [2], [1]])
    split = data.from_arrays(examples, labels, classes=3)
    assert (len(split), split.shape, split.label_shape, split.block) == (4, (3,), (1,), None)
    found = read(split, 1, 3)
    assert np.array_equal(found[0], examples[1:3]) and np.array_equal(found[1], labels[1:3])
    labels[2] = 3
    assert "label 3 of example 12 " in message(lambda: data.check_labels(split, labels, 10))


@pytest.mark.parametrize(
    ("examples", "labels", "expected"),
    [
        (np.zeros((3, 2)), np.zeros(4), "3 examples.* 4 labels"),
        (np.zeros((0, 2)), np.zeros(0), r"\(0, 2\)"),
        (np.zeros((3, 2)), np.zeros(()), "0 labels"),
        (np.array(["a", "b"]), np.zeros(2), "<U1"),
        (np.zeros((2, 2), np.complex128), np.zeros(2), "complex128"),
        (np.zeros((2, 2), np.float16), np.zeros(2), "float16"),
    ],
)
def test_arrays_that_are_no_split_are_refused(examples, labels, expected):
    assert re.search(expected, message(lambda: data.from_arrays(examples, labels)))


@pytest.mark.parametrize("labels", [np.array([0, -1, 1]), np.array([0, 2, 1]), np.array([0.0, 1.0, 1.0])])
def test_labels_are_integers_of_the_classes(labels):
    split = data.from_arrays(np.zeros((3, 1)), labels, classes=2)
    assert message(lambda: data.check_labels(split, labels))
    data.check_labels(data.from_arrays(np.zeros((3, 1)), labels), labels)


@pytest.fixture
def h5(tmp_path):
    path = tmp_path / "set.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["images"] = rng.integers(0, 256, (23, 3, 2), np.uint8)
        file.create_dataset("floats", data=rng.random((23, 6), np.float32).astype(">f4"), chunks=(5, 2))
        file["labels"] = rng.integers(0, 4, 23)
        file["group/short"] = np.zeros(22)
        file["none"] = np.zeros((0, 2))
        file["scalar"] = 1.0
        file["words"] = ["a"] * 23
    return path


@pytest.mark.parametrize("name", ["images", "floats"])
def test_hdf5_reads_slices_of_what_was_written(h5, name):
    split = data.hdf5(h5, name, classes=4)
    with h5py.File(h5) as file:
        examples, labels = file[name][...], file["labels"][...]
    assert (len(split), split.shape, split.dtype.isnative) == (23, examples.shape[1:], True)
    assert split.scale == (1 / 255 if name == "images" else 1)
    for start, stop in ((0, 23), (4, 9), (22, 23)):
        found = read(split, start, stop)
        assert np.array_equal(found[0], examples[start:stop])
        assert np.array_equal(found[1], labels[start:stop])


def test_a_block_of_hdf5_is_whole_chunks_of_a_few_megabytes(tmp_path):
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (100_000, 1000), np.uint8, chunks=(48, 1000))
        file["labels"] = np.zeros(100_000)
    block = data.hdf5(path).block
    assert block % 48 == 0 and 2e6 < block * 1000 < 8e6


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("image", "labels"), "did you mean 'images'?"),
        (("images", "nothing"), "group/short"),
        (("group", "labels"), "'group'"),
        (("scalar", "labels"), "'scalar'"),
        (("images", "group/short"), "22"),
        (("none", "none"), ": none "),
        (("words", "labels"), "object"),
    ],
)
def test_datasets_that_do_not_fit_are_named_with_the_file(h5, names, expected):
    text = message(lambda: data.hdf5(h5, *names))
    assert str(h5) in text and expected in text


def test_a_file_that_is_no_hdf5_is_named(tmp_path, h5):
    path = tmp_path / "other.h5"
    assert f"{path}: no such file" in message(lambda: data.hdf5(path))
    for raw in (b"", b"no data", h5.read_bytes()[:3000]):
        path.write_bytes(raw)
        assert str(path) in message(lambda: data.hdf5(path))
    assert str(tmp_path) in message(lambda: data.hdf5(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EAGAIN])
def test_file_systems_without_locks(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a network file system without locks. EAGAIN differs: another process is writing to the file."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((5, 2, 2)), np.arange(5)
    real = h5py.File

    def without_locks(path: Path, mode: str, locking: bool | None = None) -> h5py.File:
        if locking is not False:
            raise OSError(number, f"unable to lock file, errno = {number}")
        return real(path, mode, locking=locking)

    assert data.hdf5(tmp_path / "d.h5").note is None
    monkeypatch.setattr(h5py, "File", without_locks)
    if number == errno.EAGAIN:
        with pytest.raises(DataError, match="unable to lock"):
            data.hdf5(tmp_path / "d.h5")
        return
    split = data.hdf5(tmp_path / "d.h5")
    assert str(tmp_path / "d.h5") in str(split.note) and "lock" in str(split.note)
    examples, labels = np.empty((5, 2, 2)), np.empty(5, np.int64)
    split.read(0, 5, examples, labels)
    assert labels.tolist() == [0, 1, 2, 3, 4]
