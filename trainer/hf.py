"""`python -m trainer.hf import | export`: see trainer/export/hf.py."""

import sys

from trainer.errors import FAILED
from trainer.export.hf import main, refuse

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(refuse("interrupted", status=FAILED))
