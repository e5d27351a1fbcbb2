"""Damage checkpoints in many ways, and count how the damage is detected.

python bench/damage.py 1000
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support import damage

damage.main(int(sys.argv[1]))
