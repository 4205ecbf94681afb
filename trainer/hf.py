"""`python -m trainer.hf import | export`: see trainer/export/hf.py."""

import sys

from trainer.errors import EXIT_FAILURE
from trainer.export.hf import main, print_errors

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(print_errors("interrupted", status=EXIT_FAILURE))
