"""Run several scripts one after another in one process, each as it is."""

import runpy
import sys

for script in sys.argv[1:]:
    print("script", script, flush=True)
    runpy.run_path(script, run_name="__main__")
