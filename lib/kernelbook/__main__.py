import sys

from kernelbook.cli import main

sys.exit(main())
