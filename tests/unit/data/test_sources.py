"""Examples in files as people have them: what is read, and errors that name file and example."""

from __future__ import annotations

import gc
import io
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from mpitrain import data
from mpitrain.data.batch import Loading
from mpitrain.data.checks import check_examples

from ...support.examples import examples_of, pixels, png, refused

ROWS = 23


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class TestImageFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for number, name in enumerate(["cats/1.png", "cats/more/2.PNG", "dogs/3.png", "dogs/4.png", "dogs/notes.txt"]):
            path = tmp_path / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(pixels(number)))
        return tmp_path / "images"

    def test_examples_are_pixels_and_classes(self, folder: Path) -> None:
        split = data.image_folder(folder)
        assert split.classes == 2
        read = examples_of(split)
        assert [int(label[0]) for _, label in read] == [0, 0, 1, 1]
        for number, (image, _) in enumerate(read):
            np.testing.assert_array_equal(image[0], pixels(number))

    def test_size_and_grey(self, folder: Path) -> None:
        ((image, _), *_) = examples_of(data.image_folder(folder, (8, 8), channels=1))
        assert image.shape == (1, 8, 8, 1) and image.dtype == np.uint8

    def test_a_damaged_image_is_named(self, folder: Path) -> None:
        path = folder / "dogs/3.png"
        path.write_bytes(path.read_bytes()[:60])
        refused(path, examples_of, data.image_folder(folder))

    def test_a_changed_image_is_named(self, folder: Path) -> None:
        split, path = data.image_folder(folder), folder / "cats/1.png"
        examples_of(split)
        path.write_bytes(png(pixels(9)))
        os.utime(path, ns=(1, 1))
        refused(path, examples_of, split)

    def test_images_of_different_sizes_are_named(self, folder: Path) -> None:
        path = folder / "dogs/3.png"
        path.write_bytes(png(pixels(1, 5, 5)))
        split = data.image_folder(folder)
        refused(path, split.load, np.arange(4), 0, 0)

    def test_folders_without_images(self, tmp_path: Path) -> None:
        refused(tmp_path / "none", data.image_folder, tmp_path / "none")
        refused(tmp_path, data.image_folder, tmp_path)
        (tmp_path / "cats").mkdir()
        refused(tmp_path / "cats", data.image_folder, tmp_path)


def table() -> pa.Table:
    rng = np.random.default_rng(1)
    return pa.table(
        {
            "age": rng.integers(0, 90, ROWS),
            "height": rng.random(ROWS).astype(np.float32),
            "name": [f"name {i}" for i in range(ROWS)],
            "words": [list(range(i % 3)) for i in range(ROWS)],
            "label": rng.integers(0, 2, ROWS),
        }
    )


def write_table(kind: str, path: Path) -> Path:
    if kind == "parquet":
        pa.parquet.write_table(table(), path, row_group_size=5)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table().schema) as file:
            file.write_table(table(), max_chunksize=5)
    elif kind == "stream":
        with pa.ipc.new_stream(path, table().schema) as file:
            file.write_table(table())
    else:
        pyarrow.csv.write_csv(table().drop(["words"]), path)
    return path


READERS = {"parquet": data.parquet, "arrow": data.arrow, "stream": data.arrow, "csv": data.csv}


class TestDecodeImage:
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize("subsampling", [0, 2])
    def test_pixels_are_those_of_pillow(self, mode: str, channels: int, subsampling: int) -> None:
        file, image = io.BytesIO(), Image.fromarray(pixels(0)).resize((37, 21)).convert(mode)
        image.save(file, "JPEG", subsampling=subsampling)
        expected = np.asarray(Image.open(file).convert("RGB" if channels == 3 else "L"))
        decoded = data.decode_image(file.getvalue(), channels)
        np.testing.assert_array_equal(decoded, expected.reshape(21, 37, channels), strict=True)

    def test_damage(self) -> None:
        file = io.BytesIO()
        Image.fromarray(pixels(0)).save(file, "JPEG")
        with pytest.raises(OSError, match="truncated"):
            data.decode_image(file.getvalue()[:-10])
        refused("channels=4", data.decode_image, file.getvalue(), 4)


class TestTables:
    @pytest.mark.parametrize("kind", READERS)
    def test_columns_are_arrays(self, kind: str, tmp_path: Path) -> None:
        split = READERS[kind](write_table(kind, tmp_path / "t"), ["age", "height"], "label", classes=2)
        assert split.shape == (2,) and len(split) == ROWS
        batch = split.read_batch(3, 17)
        expected = table().slice(3, 14)
        np.testing.assert_allclose(batch.examples[:, 0], expected["age"].to_numpy(), rtol=1e-6)
        np.testing.assert_allclose(batch.examples[:, 1], expected["height"].to_numpy(), rtol=1e-6)
        np.testing.assert_array_equal(batch.labels, expected["label"].to_numpy())

    @pytest.mark.parametrize("kind", READERS)
    def test_rows_are_dicts(self, kind: str, tmp_path: Path) -> None:
        columns = ["age", "name"] if kind == "csv" else ["age", "name", "words"]
        split = READERS[kind](write_table(kind, tmp_path / "t"), columns).map(lambda row: (row["name"], len(row)))
        batch = split.load(np.array([22, 4, 0]), 0, 0).examples
        assert batch[0] == ["name 22", "name 4", "name 0"] and batch[1].tolist() == [len(columns)] * 3

    def test_several_files(self, tmp_path: Path) -> None:
        for number in range(3):
            write_table("parquet", tmp_path / f"part-{number}.parquet")
        split = data.parquet(str(tmp_path / "part-*.parquet"), ["age"], "label")
        assert len(split) == 3 * ROWS
        ages = split.read_batch(0, len(split)).examples[:, 0]
        np.testing.assert_array_equal(ages, np.tile(table()["age"].to_numpy(), 3))

    def test_lists_of_fixed_size(self, tmp_path: Path) -> None:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12.0)), 3)
        pa.parquet.write_table(pa.table({"x": vectors, "y": [0, 1, 0, 1]}), tmp_path / "t")
        batch = data.parquet(tmp_path / "t", label="y").read_batch(1, 3)
        assert batch.examples.tolist() == [[3, 4, 5], [6, 7, 8]]

    def test_mistakes(self, tmp_path: Path) -> None:
        path = write_table("parquet", tmp_path / "t")
        refused("'height'", data.parquet, path, ["hight"], "label")
        refused("name is of type string", data.parquet, path, None, "label")
        refused(tmp_path / "none", data.parquet, tmp_path / "none")
        refused("*.parquet", data.parquet, str(tmp_path / "*.parquet"))
        pa.parquet.write_table(pa.table({"x": [1.0, None, 3.0], "y": [1, 2, 3]}), tmp_path / "nulls")
        refused("row 1", data.parquet(tmp_path / "nulls", label="y").read_batch, 0, 3)
        lists = pa.array([[1, 2], [3, None], [4, 5]], pa.list_(pa.int64(), 2))
        pa.parquet.write_table(pa.table({"x": lists, "y": [1, 2, 3]}), tmp_path / "nulls")
        refused("row 1", data.parquet(tmp_path / "nulls", label="y").read_batch, 0, 3)
        times = pa.array([1, 2], pa.timestamp("us", tz="UTC"))
        pa.parquet.write_table(pa.table({"x": times, "y": [1, 2]}), tmp_path / "times")
        refused("timestamp", data.parquet, tmp_path / "times", label="y")
        path.write_bytes(path.read_bytes()[:-20])
        refused(path, data.parquet, path)

    @pytest.mark.parametrize(
        ("row", "word"), [("3", "Row #5"), ("3,x", ", row 5 has 'x'"), ("3,", ", row 5: b has no value")]
    )
    def test_rows_of_csv_files_are_named(self, row: str, word: str, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 3 + row + "\n1,2\n")
        refused(word, lambda: data.csv(tmp_path / "t.csv", label="a").read_batch(0, 5))

    def test_memory_of_a_csv_file_is_released(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 100_000)
        before = pa.total_allocated_bytes()
        split = data.csv(tmp_path / "t.csv", label="a")
        examples = split.read_batch(0, 100_000).examples
        assert pa.total_allocated_bytes() - before > examples.nbytes
        split.release()
        until = time.monotonic() + 10  # threads of Arrow that parse may still hold their parts
        while pa.total_allocated_bytes() - before >= examples.nbytes // 2:
            assert time.monotonic() < until
            gc.collect()
            time.sleep(0.01)
        np.testing.assert_array_equal(split.read_batch(0, 100_000).examples, examples)

    def test_a_changed_file_is_named(self, tmp_path: Path) -> None:
        path = write_table("parquet", tmp_path / "t")
        split = data.parquet(path, ["age"], "label")
        os.utime(path, ns=(1, 1))
        refused(path, split.read_batch, 0, 3)


def test_windows() -> None:
    tokens = np.arange(20)
    split = data.windows(tokens, 6, 4)
    read = examples_of(split)
    assert [window[0].tolist() for window, _ in read] == [list(range(i, i + 6)) for i in (0, 4, 8, 12)]
    assert all((later == window + 1).all() for window, later in read)
    assert len(examples_of(data.windows(tokens, 6, 1, ahead=0))) == 15
    refused("at least 7", data.windows, np.arange(6), 6)
    refused("stride=0", data.windows, tokens, 6, 0)


class TestTransforms:
    def test_functions_are_applied_in_order(self) -> None:
        split = data.from_arrays(np.arange(6.0).reshape(3, 2), np.arange(3)).map(lambda e: (e[0] + 1, e[1]))
        split = split.map(lambda example: {"sum": example[0].sum(), "label": example[1]})
        assert split.load(np.array([2, 0]), 0, 0).examples["sum"].tolist() == [11, 3]

    def test_random_numbers_depend_on_the_position(self) -> None:
        split = data.from_arrays(np.zeros((8, 2)), np.arange(8)).random_map(lambda e, rng: (rng.random(), e[1]))
        whole = split.load(np.arange(6), 3, 10).examples[0]
        parts = [split.load(np.arange(start, start + 2), 3, 10 + start).examples[0] for start in (0, 2, 4)]
        np.testing.assert_array_equal(whole, np.concatenate(parts))
        assert len(set(whole)) == 6
        assert set(whole).isdisjoint(split.load(np.arange(6), 4, 10).examples[0])

    def test_an_exception_names_example_and_line(self) -> None:
        split = data.from_arrays(np.zeros((8, 2)), np.arange(8)).map(lambda example: 1 // int(example[1] - 5))
        refused("example 5", split.load, np.arange(8), 0, 0)
        refused(__file__, split.load, np.arange(8), 0, 0)

    def test_a_batch_with_another_number_of_examples_is_refused(self) -> None:
        split = data.from_arrays(np.zeros((8, 2)), np.arange(8)).map(lambda example: example).as_arrays()
        short = split.collated(lambda examples: (np.zeros((len(examples) - 1, 2)), np.zeros(len(examples) - 1)))
        refused("(3, 2)", short.read_batch, 0, 3)

    def test_scaled_as_in_a_batch(self) -> None:
        images = data.mnist().train
        batch = images.map(lambda example: example).load(np.arange(4), 0, 0).examples[0]
        np.testing.assert_array_equal(batch, images.read_batch(0, 4).examples * np.float32(images.scale))


class TestOrders:
    def test_weighted(self) -> None:
        order = data.orders.Weighted([0, 1, 3, 0])
        drawn = order.indices(0, 8000, 4, 1)
        counts = np.bincount(drawn, minlength=4)
        assert counts[0] == counts[3] == 0 and 0.7 < counts[2] / 8000 < 0.8
        np.testing.assert_array_equal(drawn[100:300], order.indices(100, 200, 4, 1))

    def test_grouped_by_length(self) -> None:
        lengths = np.random.default_rng(0).integers(1, 100, 103)
        order = data.orders.GroupedByLength(lengths, 20)
        whole = order.indices(0, 206, 103, 5)
        assert sorted(whole[:103]) == sorted(whole[103:]) == list(range(103))
        assert (whole[:103] != whole[103:]).any()
        assert all((np.diff(lengths[whole[start : start + 20]]) <= 0).all() for start in (0, 20, 103, 183))
        for start, count in ((17, 9), (95, 30), (200, 6)):
            np.testing.assert_array_equal(order.indices(start, count, 103, 5), whole[start : start + count])

    def test_streams(self) -> None:
        split = data.from_arrays(np.arange(14.0), np.arange(14)).ordered(data.orders.Streams(4))
        assert len(split) == 12
        steps = split.order(0, 12, 0).reshape(3, 4)
        assert steps.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]

    def test_own_function(self) -> None:
        split = data.from_arrays(np.arange(5.0), np.arange(5))
        own = split.ordered(lambda seed, position: (seed + 2 * position) % 5)
        assert own.order(3, 4, 1).tolist() == [2, 4, 1, 3]
        assert own.order_name != split.order_name
        refused("returned 9", split.ordered(lambda seed, position: 9).order, 0, 1, 0)
        refused("returned True", split.ordered(lambda seed, position: True).order, 0, 1, 0)
        refused("ZeroDivisionError", split.ordered(lambda seed, position: 1 // 0).order, 0, 1, 0)
        refused("returned 0.5", split.ordered(lambda seed, position: 0.5).order, 0, 1, 0)  # type: ignore[arg-type]

    def test_orders_of_files_that_are_read_in_blocks(self) -> None:
        split = data.from_arrays(np.arange(5.0), np.arange(5))
        split.ordered(data.orders.Sequential()).check_streamed()
        refused("Weighted", split.ordered(data.orders.Weighted([1] * 5)).check_streamed)

    def test_a_wrong_label_is_named_by_its_index(self) -> None:
        labels = np.arange(9) % 3
        labels[5] = 7
        split = data.from_arrays(np.zeros((9, 2)), labels, 3).map(lambda example: example)
        split = split.as_arrays()
        loader = split.own_loader(4, Loading(check=partial(check_examples, "training", split, None, 3)))
        refused("of example 5 ", lambda: [loader.batch(position, 3) for position in (9, 12, 15)])

    def test_streams_need_their_number_of_examples(self) -> None:
        split = data.from_arrays(np.arange(14.0), np.arange(14)).ordered(data.orders.Streams(4))
        split.check_step(4)
        refused("Streams(6)", split.check_step, 6)

    def test_mistakes(self) -> None:
        split = data.from_arrays(np.arange(5.0), np.arange(5))
        refused("4 weights", split.ordered, data.orders.Weighted([1] * 4))
        refused("not negative", data.orders.Weighted, [1, -1])
        refused("2 lengths", split.ordered, data.orders.GroupedByLength([1, 2], 2))
        refused("Streams(6)", split.ordered, data.orders.Streams(6))


class TestStreams:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_ranks_and_processes_take_shares(self, workers: int) -> None:
        loaders = [data.stream(range(24), 24).own_loader(0, Loading(workers, 1, rank, 2)) for rank in range(2)]
        try:
            read = [loader.batch(position, 3).examples for position in range(0, 12, 3) for loader in loaders]
        finally:
            for loader in loaders:
                loader.close()
        read = sorted(int(example) for batch in read for example in batch)
        if workers == 0:
            assert read == list(range(24))
        else:  # a process may have made more batches than another, and begins its share again
            assert len(read) == 24 and set(read) <= set(range(24))

    def test_a_share_opened_by_a_function(self) -> None:
        split = data.stream(lambda share, shares: range(share, 6, shares), 6)
        loader = split.own_loader(0, Loading(0, 1, 1, 3))
        assert [loader.batch(start, 1).examples.tolist() for start in range(3)] == [[1], [4], [1]]

    def test_a_resume_skips_what_was_used(self) -> None:
        split = data.stream(range(20), 6)
        alone = split.own_loader(0, Loading(share=1, shares=2))
        read = [alone.batch(position, 3).examples.tolist() for position in range(3, 45, 6)]
        assert read[:4] == [[1, 3, 5], [7, 9, 11], [13, 15, 17], [19, 1, 3]]
        for step in range(7):
            resumed = split.own_loader(0, Loading(share=1, shares=2))
            assert resumed.batch(3 + 6 * step, 3).examples.tolist() == read[step]

    def test_mistakes(self) -> None:
        refused("length=0", data.stream, range(3), 0)
        refused("no examples", data.stream([], 3).load, np.arange(1), 0, 0)
        refused("once", data.stream, iter([1]), 3)
        refused("order", data.stream(range(3), 3).ordered, data.orders.Weighted([1] * 3))
