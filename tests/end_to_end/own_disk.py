"""train.py on hosts with disks of their own: each rank gets a checkpoint directory for itself."""

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from training.failure import exit_code_of
from training.train import main

if __name__ == "__main__":
    place = sys.argv.index("--checkpoint-dir") + 1
    sys.argv[place] = f"{sys.argv[place]}-of-rank-{os.environ['RANK']}"
    sys.exit(exit_code_of(main))
