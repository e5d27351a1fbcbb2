"""The manifest: unpacking returns the packed content."""

from __future__ import annotations

from mpitrain.checkpoint.digest import digest_of
from mpitrain.checkpoint.manifest import Manifest, Range, block_size_for


def test_a_seal_of_what_several_nodes_wrote() -> None:
    x, y, z, rest = (digest_of(data) for data in (b"x", b"y", b"z", b"rest"))
    ranges = {"a": [Range(4096, 4100, x), Range(4100, 4200, y)], "b": [Range(4300, 4304, z)]}
    manifest = Manifest(block_size_for(["a", "a", "b"]), 5000, rest, ranges)
    assert Manifest.unpack(manifest.pack()) == manifest
    assert [*manifest.other_ranges()] == [(4200, 4300), (4304, 5000)]
