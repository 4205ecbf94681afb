"""`longhaul train`, and the entry point of ./run_train.sh."""

import sys

from trainer.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
