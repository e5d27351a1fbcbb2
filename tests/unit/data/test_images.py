"""Images in folders: the examples, and errors that name the file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from mpitrain import Job, data, nn, optim
from mpitrain.errors import DataError

from ...support.examples import examples_of, pixels, png, refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(["cats/1.png", "cats/more/2.PNG", "dogs/3.png", "dogs/4.png", "dogs/notes.txt"]):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels(number)))
    return tmp_path / "images"


class TestImageFolder:
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

    def test_images_that_the_user_may_not_read_are_left_out_with_a_count(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder, root = Path(name), os.geteuid()
            folder.chmod(0o755)
            (folder / "cats").mkdir()
            for number in range(3):
                (folder / "cats" / f"{number}.png").write_bytes(png(pixels(number)))
                (folder / "cats" / f"{number}.png").chmod(0 if number == 1 else 0o644)
            if root == 0:  # who may read all files
                os.seteuid(65534)
            try:
                split = data.image_folder(folder)
            finally:
                os.seteuid(root)
        assert len(split) == 2 and "1 file" in str(split.note) and "cats/1.png" in str(split.note)

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

    def test_one_class_and_wrong_sizes(self, tmp_path: Path) -> None:
        (tmp_path / "only").mkdir()
        (tmp_path / "only" / "1.heic").write_bytes(b"x")
        refused(".heic", data.image_folder, tmp_path)
        (tmp_path / "only" / "1.png").write_bytes(png(pixels(0)))
        assert "one class" in str(data.image_folder(tmp_path).note)
        before = data.image_folder(tmp_path).identity()
        (tmp_path / "only" / "1.png").write_bytes(png(pixels(0, 50, 50)))
        assert data.image_folder(tmp_path).identity() != before
        for size in (32, (0, 3), (1, 2, 3)):
            refused("size=", data.image_folder, tmp_path, size)

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


class TestImagesOfOthers:
    def test_what_is_no_example_is_counted(self, folder: Path) -> None:
        for name in (".DS_Store", "cats/._1.png", "cats/Thumbs.db", "dogs/7.heic", ".hidden/1.png", "__MACOSX/1.png"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")
        (folder / "birds").symlink_to("nowhere")
        (folder / "dogs" / "9.png").symlink_to("nowhere")
        (folder / "at_the_top.png").write_bytes(png(pixels(1)))
        split = data.image_folder(folder)
        assert split.classes == 2 and len(split) == 4
        assert "10 files" in str(split.note)  # with dogs/notes.txt

    def test_links_to_folders(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "5.png").write_bytes(png(pixels(5)))
        for name, target in [("up", ".."), ("top", tmp_path), ("self", "."), ("a", "../../more"), ("b", "../../more")]:
            (folder / "cats" / name).symlink_to(target)
        assert [int(label[0]) for _, label in examples_of(data.image_folder(folder))] == [0] * 4 + [1] * 2

    def test_names_of_any_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / os.fsdecode(b"\xff") / os.fsdecode(b"Mu\xf1oz.png")
        path.parent.mkdir()
        path.write_bytes(png(pixels(0)))
        split = data.image_folder(tmp_path)
        np.testing.assert_array_equal(examples_of(split)[0][0][0], pixels(0))
        assert split.class_names == [os.fsdecode(b"\xff")] and json.dumps(split.class_names)


def tiff(values: np.ndarray, bits: int, sample_format: int = 1, photometric: int = 1) -> bytes:
    """Return an uncompressed TIFF file, written as in its specification (Aldus, 1992)."""
    height, width = values.shape
    packed = "".join(f"{value:0{bits}b}" for value in values.ravel().tolist()) if bits < 16 else ""
    strip = int(packed, 2).to_bytes(len(packed) // 8, "big") if packed else values.tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(strip)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in {**tags, 339: sample_format}.items())
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + struct.pack("<H", 10) + entries + bytes(4)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RAMP = np.arange(256).reshape(16, 16)


class TestRangesOfPixels:
    @pytest.mark.parametrize("channels", [1, 3])
    @pytest.mark.parametrize(
        "content",
        [
            saved(Image.fromarray((RAMP * 257).astype(np.uint16)), "PNG"),
            saved(Image.fromarray((RAMP * 257).astype(np.uint16)), "TIFF"),
            tiff((RAMP * 257).astype("<u2"), 16),
            tiff((RAMP * 257 * 65537).astype("<u4"), 32),
            tiff((65535 - RAMP * 257).astype("<u2"), 16, photometric=0),
            tiff(np.rint(RAMP * 4095 / 255).astype(int), 12),
            b"P5 16 16 65535\n" + (RAMP * 257).astype(">u2").tobytes(),
            b"P5 16 16 1023\n" + np.rint(RAMP * 1023 / 255).astype(">u2").tobytes(),
            b"P2 16 16 65535\n" + " ".join(map(str, (RAMP * 257).ravel())).encode(),
            b"P6 16 16 65535\n" + np.repeat(RAMP * 257, 3).astype(">u2").tobytes(),
            saved(Image.fromarray(RAMP.astype(np.uint8)), "PNG"),
        ],
    )
    def test_the_range_is_that_of_the_file(self, content: bytes, channels: int) -> None:
        expected = np.broadcast_to(RAMP[..., np.newaxis], (16, 16, channels))
        assert np.abs(data.decode_image(content, channels).astype(int) - expected).max() <= 1
        assert data.decode_image(content, channels, (8, 8)).shape == (8, 8, channels)

    @pytest.mark.parametrize(
        "content",
        [
            tiff(RAMP.astype("<f4"), 32, sample_format=3),
            tiff(RAMP.astype("<i2"), 16, sample_format=2),
            tiff(RAMP, 8, sample_format=2),
            saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
        ],
    )
    def test_pixels_without_a_range_are_refused(self, content: bytes) -> None:
        with pytest.raises(ValueError, match="range"):
            data.decode_image(content)

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("channels", [1, 3])
    def test_the_orientation_is_applied(self, kind: str, orientation: int, channels: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"JPEG": {"quality": 100}, "WEBP": {"lossless": True}}.get(kind, {})
        content = saved(Image.fromarray(pixels(0)), kind, exif=exif, **options)
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB" if channels == 3 else "L")
        expected = np.asarray(turned).reshape(turned.height, turned.width, channels)
        np.testing.assert_array_equal(data.decode_image(content, channels), expected)
        scaled = data.decode_image(content, channels, expected.shape[:2])  # grey JPEG files are decoded as such
        assert scaled.shape == expected.shape and (channels == 1 or np.array_equal(scaled, expected))

    def test_colours_without_transparency_and_of_the_first_frame(self) -> None:
        red = Image.new("RGBA", (4, 4), (255, 0, 0, 9))
        palette = red.convert("RGB").quantize(4)
        frames = saved(palette, "GIF", save_all=True, append_images=[Image.new("P", (4, 4), 3)])
        contents = [
            saved(red, "PNG"),
            saved(palette, "PNG", transparency=b"\0"),
            frames,
            saved(red, "WEBP", lossless=True),
        ]
        for content in contents:
            assert {tuple(pixel) for pixel in data.decode_image(content).reshape(-1, 3).tolist()} == {(255, 0, 0)}

    @pytest.mark.filterwarnings("ignore:Corrupt EXIF")
    def test_damaged_exif_data_is_ignored(self) -> None:
        content = saved(Image.fromarray(pixels(0)), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
        assert data.decode_image(content).shape == (6, 4, 3)

    @pytest.mark.parametrize("size", [None, (8, 8)])
    @pytest.mark.parametrize("place", [-30, -60])
    def test_the_checksums_of_png_files(self, place: int, size: tuple[int, int] | None) -> None:
        content = bytearray(png(pixels(0, 20, 20)))
        content[place] ^= 1
        with pytest.raises(OSError, match=r"broken|damaged|cannot|truncated"):
            data.decode_image(bytes(content), size=size)

    @pytest.mark.parametrize("kind", ["AVIF", "JPEG", "TIFF", "GIF", "BMP", "WEBP", "JPEG2000", "PPM"])
    def test_damage_is_an_os_error(self, kind: str) -> None:
        content = saved(Image.fromarray(pixels(0, 30, 30)), kind)
        for place in range(0, len(content), 7):
            damaged = content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :]
            for part in (damaged, content[:place]):
                with contextlib.suppress(OSError, ValueError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    data.decode_image(part)

    @pytest.mark.parametrize(
        ("content", "word"), [(b"\x1f\x8b\x08\0", "gzip"), (b"<!DOCTYPE html>", "HTML"), (b"", "not")]
    )
    def test_what_is_no_image_is_named(self, content: bytes, word: str) -> None:
        with pytest.raises(OSError, match=word):
            data.decode_image(content)
