"""The names that programs import from ``horovod.torch.mpi_ops``."""

from __future__ import annotations

from ...errors import HorovodInternalError
from .. import basics, process_sets
from ..basics import *  # noqa: F403
from ..process_sets import *  # noqa: F403
from . import operations, submission
from .compression import Compression
from .operations import *  # noqa: F403
from .submission import *  # noqa: F403

__all__ = ["Compression", "HorovodInternalError"]
__all__ += [*basics.__all__, *operations.__all__, *process_sets.__all__, *submission.__all__]
