"""Kill training runs at random moments, many inside a save, and resume them.

python bench/kills.py 200
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support import kills

kills.main(int(sys.argv[1]))
