#!/bin/sh
# Everything that has to hold on a machine with a GPU, in one command; see tools/gpu_check.py --help.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3}" tools/gpu_check.py "$@"
