"""Sphinx configuration."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mpitrain.version import __version__  # noqa: E402

project = "mpitrain"
author = "the mpitrain maintainers"
release = version = __version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"mpitrain {__version__}"
