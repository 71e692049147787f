"""How fast the data path is, against its peers: tools/bench/data.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.bench.data import main  # found through the line above

if __name__ == "__main__":
    main()
