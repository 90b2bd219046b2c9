"""Measurements, one module each; results with date and machine are in bench/results."""

import os

# As an instance does (services/worker/instance/main.py): OpenMP reads it when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
