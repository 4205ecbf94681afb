"""`python -m trainer.launch`: what ./run_train.sh runs."""

import sys

from trainer.errors import EXIT_FAILURE
from trainer.launch.launcher import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(EXIT_FAILURE)
