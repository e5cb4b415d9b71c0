"""Run the umbrella command: `python -m zmqtrain.cli`."""

import sys

from zmqtrain.cli import main

sys.exit(main())
