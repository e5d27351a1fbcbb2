"""Write malicious checkpoints with valid digests, and check that reading them is harmless; see ``docs/checkpoints.md``.

python bench/malicious.py 10000 [SEED]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support import malicious

sys.exit(malicious.main(*map(int, sys.argv[1:])))
