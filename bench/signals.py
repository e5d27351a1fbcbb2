"""Send one or two signals to ``mpitrain run`` at random moments, in every mode.

python bench/signals.py 50
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support import signals

signals.main(int(sys.argv[1]))
