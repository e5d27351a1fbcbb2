"""Images in folders: the examples, and errors that name the file."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mpitrain import Job, data, nn, optim
from mpitrain.errors import DataError

from ...support.examples import examples_of, pixels, png, refused


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
        assert split.map(lambda example: example).class_names == ["cats", "dogs"]
        read = examples_of(split)
        assert [int(label[0]) for _, label in read] == [0, 0, 1, 1]
        for number, (image, _) in enumerate(read):
            np.testing.assert_array_equal(image[0], pixels(number))

    def test_size_and_grey(self, folder: Path) -> None:
        ((image, _), *_) = examples_of(data.image_folder(folder, (8, 8), channels=1))
        assert image.shape == (1, 8, 8, 1) and image.dtype == np.uint8

    def test_splits_with_other_classes_are_refused(self, folder: Path, tmp_path: Path) -> None:
        """If one split lacks the folder of a class, the labels of other classes differ between the splits."""
        for name in ("cats", "dogs", "birds"):
            (tmp_path / "more" / name).mkdir(parents=True)
            (tmp_path / "more" / name / "1.png").write_bytes(png(pixels(1)))
        splits = {"train": data.image_folder(folder), "validation": data.image_folder(tmp_path / "more")}
        model = nn.Sequential(nn.Flatten(), nn.Dense(8, 2))
        job = Job(model=model, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.sgd(0.1), **splits)
        with pytest.raises(DataError, match="lacks birds"):
            assert job.validation_split is None

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


class TestDecodeImage:
    def test_size_is_that_of_a_folder(self, tmp_path: Path) -> None:
        path = tmp_path / "images" / "one" / "1.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(png(pixels(2, 20, 30)))
        ((image, _),) = examples_of(data.image_folder(tmp_path / "images", (8, 6)))
        decoded = data.decode_image(path.read_bytes(), size=(8, 6))
        np.testing.assert_array_equal(decoded, image[0], strict=True)
        assert decoded.flags.writeable

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
