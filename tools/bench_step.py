"""How fast a training step is, against loops written by hand: tools/bench/step.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.bench.step import main  # found through the line above

if __name__ == "__main__":
    main()
