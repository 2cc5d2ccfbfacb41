"""Run several scripts one after another in one process, each as it is."""

import runpy
import sys
from pathlib import Path

for script in sys.argv[1:]:
    print("script", Path(script).stem, flush=True)
    runpy.run_path(script, run_name="__main__")
