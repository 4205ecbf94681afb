"""`python -m trainer.generate`: see trainer/export/generate.py."""

import sys

from trainer.export.generate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
