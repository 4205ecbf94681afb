"""`longhaul train`, and the entry point of ./run_train.sh."""

import sys

from trainer.errors import EXIT_FAILURE
from trainer.launch.launcher import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(EXIT_FAILURE)
